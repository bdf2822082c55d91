#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/bytes.h"
#include "storage/file_io.h"
#include "storage/json_text.h"
#include "storage/layout.h"
#include "storage/safetensors.h"
#include "storage/utf8.h"

namespace zeroshard {
namespace {

// The header is padded to a multiple of this many bytes, as the reference does, so that data is
// aligned.
constexpr uint64_t kHeaderAlignment = 8;
// Far below what a file offset holds.
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 60;

constexpr std::string_view FormatName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kBfloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
  }
  return "";
}

absl::StatusOr<uint64_t> BytesOf(const TensorSpec& tensor) {
  const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
  if (empty) return 0;
  uint64_t elements = 1;
  for (uint64_t dimension : tensor.shape) {
    if (dimension > kMaxElements / elements) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", tensor.name, "\" has more than ", kMaxElements, " elements"));
    }
    elements *= dimension;
  }
  return elements * SizeOf(tensor.dtype);
}

absl::Status CheckName(const std::string& name, std::unordered_set<std::string_view>& names) {
  if (name.empty() || name == "__metadata__" || !IsUtf8(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", name, "\" cannot be the name of a tensor"));
  }
  if (names.insert(name).second) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the name \"", name, "\" is used twice"));
}

absl::Status CheckNames(const std::vector<TensorSpec>& tensors) {
  std::unordered_set<std::string_view> names;
  for (const TensorSpec& tensor : tensors) {
    ZS_RETURN_IF_ERROR(CheckName(tensor.name, names));
    for (const std::string& alias : tensor.aliases) ZS_RETURN_IF_ERROR(CheckName(alias, names));
  }
  return absl::OkStatus();
}

// Tensors with larger elements first, so that every tensor is aligned to its elements.
std::vector<size_t> OrderOfData(const std::vector<TensorSpec>& tensors) {
  std::vector<size_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return SizeOf(tensors[a].dtype) > SizeOf(tensors[b].dtype);
  });
  return order;
}

absl::StatusOr<std::string> MetadataJson(const std::vector<TensorSpec>& tensors,
                                         std::map<std::string, std::string> metadata) {
  metadata.emplace("format", "pt");
  for (const TensorSpec& tensor : tensors) {
    for (const std::string& alias : tensor.aliases) {
      metadata[absl::StrCat("alias:", alias)] = tensor.name;
    }
  }
  std::vector<std::string> members;
  for (const auto& [key, value] : metadata) {
    if (!IsUtf8(key) || !IsUtf8(value)) {
      return absl::InvalidArgumentError(absl::StrCat("metadata \"", key, "\" is not UTF-8"));
    }
    members.push_back(absl::StrCat(JsonString(key), ":", JsonString(value)));
  }
  return absl::StrCat("\"__metadata__\":{", absl::StrJoin(members, ","), "}");
}

void AppendEntryJson(std::string& json, const std::string& name, const TensorSpec& tensor,
                     uint64_t begin, uint64_t bytes) {
  absl::StrAppend(&json, ",", JsonString(name), ":{\"dtype\":\"", Abs(FormatName(tensor.dtype)),
                  "\",\"shape\":[", absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", begin,
                  ",", begin + bytes, "]}");
}

}  // namespace

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    int fd, const std::vector<TensorSpec>& tensors,
    const std::map<std::string, std::string>& metadata) {
  ZS_RETURN_IF_ERROR(CheckNames(tensors));
  SafetensorsWriter writer;
  writer.fd_ = fd;
  writer.path_ = DescribeFd(fd);
  writer.targets_.resize(tensors.size());
  ZS_ASSIGN_OR_RETURN(std::string json, MetadataJson(tensors, metadata));
  json.insert(0, "{");
  uint64_t end = 0;
  for (size_t i : OrderOfData(tensors)) {
    const TensorSpec& tensor = tensors[i];
    Target& target = writer.targets_[i];
    target.name = tensor.name;
    ZS_ASSIGN_OR_RETURN(target.bytes, BytesOf(tensor));
    std::vector<std::string> names = {tensor.name};
    names.insert(names.end(), tensor.aliases.begin(), tensor.aliases.end());
    for (const std::string& name : names) {
      AppendEntryJson(json, name, tensor, end, target.bytes);
      target.offsets.push_back(end);
      end += target.bytes;
      if (end > kMaxFileBytes || json.size() > kMaxSafetensorsHeader - kHeaderAlignment) {
        return absl::InvalidArgumentError("the tensors are too many for one safetensors file");
      }
    }
  }
  json += "}";
  json.resize(RoundUpTo(json.size(), kHeaderAlignment), ' ');
  std::string header;
  AppendInteger(header, uint64_t{json.size()});
  header += json;
  for (Target& target : writer.targets_) {
    for (uint64_t& offset : target.offsets) offset += header.size();
  }
  writer.file_bytes_ = header.size() + end;
  ZS_RETURN_IF_ERROR(ReserveSpace(fd, writer.file_bytes_, writer.path_));
  ZS_RETURN_IF_ERROR(WriteAllAt(fd, AsBytes(header), 0, writer.path_));
  return writer;
}

absl::Status SafetensorsWriter::Append(size_t tensor, std::span<const std::byte> data) {
  ZS_RETURN_IF_ERROR(status_);
  if (tensor >= targets_.size() ||
      data.size() > targets_[tensor].bytes - targets_[tensor].written) {
    return absl::InvalidArgumentError(
        absl::StrCat(data.size(), " bytes do not fit into tensor ", tensor));
  }
  Target& target = targets_[tensor];
  for (uint64_t offset : target.offsets) {
    status_ = WriteAllAt(fd_, data, offset + target.written, path_);
    ZS_RETURN_IF_ERROR(status_);
  }
  target.written += data.size();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SafetensorsWriter::Finish() && {
  ZS_RETURN_IF_ERROR(status_);
  for (const Target& target : targets_) {
    if (target.written != target.bytes) {
      return absl::FailedPreconditionError(absl::StrCat(
          "tensor \"", target.name, "\" has ", target.written, " of ", target.bytes, " bytes"));
    }
  }
  if (::ftruncate(fd_, static_cast<off_t>(file_bytes_)) != 0) {
    return ErrnoErrorAt(errno, "truncate", path_, file_bytes_);
  }
  ZS_RETURN_IF_ERROR(SyncFile(fd_, path_));
  return file_bytes_;
}

}  // namespace zeroshard
