#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/bytes.h"
#include "storage/file_io.h"
#include "storage/safetensors.h"

namespace zeroshard {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;

// Bytes of one element; 0 for an unknown type.
uint64_t ElementBytes(std::string_view dtype) {
  static constexpr std::pair<std::string_view, uint64_t> kTypes[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
      {"U32", 4},  {"F32", 4}, {"F64", 8}, {"I64", 8},     {"U64", 8}};
  for (const auto& [name, bytes] : kTypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

absl::Status Wrong(std::string_view name, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("tensor \"", Abs(name), "\": ", Abs(what)));
}

// Parses JSON and refuses an object that has a key twice, at any depth.
absl::StatusOr<Json> ParseStrictly(std::string_view text) {
  std::vector<std::set<std::string>> keys;
  std::optional<std::string> twice;
  const Json::parser_callback_t note_keys = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = key;
    }
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), note_keys, /*allow_exceptions=*/false);
  if (json.is_discarded()) return absl::InvalidArgumentError("the header is not JSON");
  if (twice) {
    return absl::InvalidArgumentError(absl::StrCat("the header has \"", *twice, "\" twice"));
  }
  return json;
}

// An array of numbers that are not negative.
std::optional<std::vector<uint64_t>> Numbers(const Json& object, const char* key) {
  const auto member = object.find(key);
  if (member == object.end() || !member->is_array()) return std::nullopt;
  std::vector<uint64_t> numbers;
  for (const Json& number : *member) {
    if (!number.is_number_unsigned()) return std::nullopt;
    numbers.push_back(number.get<uint64_t>());
  }
  return numbers;
}

// Product of sizes, or nothing when it overflows.
std::optional<uint64_t> Product(std::span<const uint64_t> sizes) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  uint64_t product = 1;
  for (uint64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return product;
}

absl::StatusOr<TensorEntry> ParseEntry(const std::string& name, const Json& json) {
  if (!json.is_object() || json.size() != 3) {
    return Wrong(name, "dtype, shape and data_offsets were expected");
  }
  const auto dtype = json.find("dtype");
  const auto shape = Numbers(json, "shape");
  const auto offsets = Numbers(json, "data_offsets");
  if (dtype == json.end() || !dtype->is_string()) return Wrong(name, "dtype is no text");
  if (!shape) return Wrong(name, "shape is no list of sizes");
  if (!offsets || offsets->size() != 2) return Wrong(name, "data_offsets are no two numbers");
  TensorEntry entry;
  entry.name = name;
  entry.dtype = dtype->get<std::string>();
  entry.shape = *shape;
  entry.begin = (*offsets)[0];
  entry.end = (*offsets)[1];
  if (entry.end < entry.begin) return Wrong(name, "data_offsets end before they begin");
  std::vector<uint64_t> sizes = *shape;
  sizes.push_back(ElementBytes(entry.dtype));
  if (sizes.back() == 0) return Wrong(name, absl::StrCat("unknown dtype ", entry.dtype));
  const std::optional<uint64_t> bytes = Product(sizes);
  if (!bytes || *bytes != entry.end - entry.begin) {
    return Wrong(name, "data_offsets do not fit dtype and shape");
  }
  return entry;
}

absl::StatusOr<std::map<std::string, std::string>> ParseMetadata(const Json& json) {
  std::map<std::string, std::string> metadata;
  if (!json.is_object()) return absl::InvalidArgumentError("__metadata__ is no object");
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) {
      return absl::InvalidArgumentError(absl::StrCat("__metadata__.", key, " is no text"));
    }
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

// The data must be the tensors one after another.
absl::Status CheckTiling(std::span<const TensorEntry> tensors, uint64_t data_bytes) {
  uint64_t next = 0;
  for (const TensorEntry& tensor : tensors) {
    if (tensor.begin != next) {
      return Wrong(tensor.name, tensor.begin > next ? "there is a hole before it"
                                                    : "it overlaps another tensor");
    }
    next = tensor.end;
  }
  if (next == data_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the tensors have ", next, " bytes, the file holds ", data_bytes, " bytes of data"));
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view header,
                                                         uint64_t data_bytes) {
  if (!header.starts_with('{')) return absl::InvalidArgumentError("the header has no {");
  ZS_ASSIGN_OR_RETURN(const Json json, ParseStrictly(header));
  if (!json.is_object()) return absl::InvalidArgumentError("the header is no object");
  SafetensorsHeader result;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      ZS_ASSIGN_OR_RETURN(result.metadata, ParseMetadata(value));
      continue;
    }
    ZS_ASSIGN_OR_RETURN(TensorEntry entry, ParseEntry(name, value));
    result.tensors.push_back(std::move(entry));
  }
  std::sort(result.tensors.begin(), result.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  ZS_RETURN_IF_ERROR(CheckTiling(result.tensors, data_bytes));
  result.data_offset = kLengthBytes + header.size();
  return result;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(int fd) {
  const std::string path = DescribeFd(fd);
  ZS_ASSIGN_OR_RETURN(const uint64_t file_bytes, RegularFileSize(fd, path));
  std::string text(kLengthBytes, '\0');
  if (file_bytes < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is too short for a safetensors file"));
  }
  ZS_RETURN_IF_ERROR(ReadAllAt(fd, std::as_writable_bytes(std::span<char>(text)), 0, path));
  const uint64_t length = IntegerAt<uint64_t>(text, 0);
  if (length > kMaxSafetensorsHeader || length > file_bytes - kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a header of ", length,
                                                   " bytes in a file of ", file_bytes,
                                                   " bytes is impossible"));
  }
  text.resize(length);
  ZS_RETURN_IF_ERROR(
      ReadAllAt(fd, std::as_writable_bytes(std::span<char>(text)), kLengthBytes, path));
  absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(text, file_bytes - kLengthBytes - length);
  if (!header.ok()) return Annotate(header.status(), path);
  return header;
}

}  // namespace zeroshard
