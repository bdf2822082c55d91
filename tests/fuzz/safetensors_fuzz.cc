// sources: storage/safetensors_reader.cc storage/safetensors_writer.cc storage/json_text.cc
// sources: storage/utf8.cc storage/file_io.cc base/fault_point.cc base/status.cc
// libs: absl_status absl_statusor absl_strings absl_str_format absl_time
// seeds: tests/fuzz/seeds/safetensors

// Two things of any bytes. As a header: it is refused, or its tensors tile the data. As names,
// shapes and metadata of a file to write: it is refused, or the strict reader takes what was
// written and finds the same names.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "storage/file_io.h"
#include "storage/safetensors.h"

namespace zeroshard {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckHeader(std::string_view text, uint64_t data_bytes) {
  const auto header = ParseSafetensorsHeader(text, data_bytes);
  if (!header.ok()) return;
  uint64_t next = 0;
  for (const TensorEntry& tensor : header->tensors) {
    Require(tensor.begin == next && tensor.end >= next);
    next = tensor.end;
  }
  Require(next == data_bytes);
}

// Cuts the input into names at bytes 0; the byte before gives shape and data type.
std::vector<TensorSpec> Tensors(std::string_view input) {
  std::vector<TensorSpec> tensors;
  while (!input.empty() && tensors.size() < 20) {
    const std::string_view name = input.substr(0, input.find('\0'));
    input.remove_prefix(std::min(input.size(), name.size() + 1));
    const uint8_t code = name.empty() ? 0 : static_cast<uint8_t>(name.back());
    if (code % 5 == 4 && !tensors.empty()) {
      tensors.back().aliases.emplace_back(name);
      continue;
    }
    TensorSpec& tensor = tensors.emplace_back();
    tensor.name = name;
    tensor.dtype = static_cast<DType>(code % 3);
    for (uint8_t d = 0; d < code % 4; ++d) tensor.shape.push_back((code >> d) % 4);
  }
  return tensors;
}

uint64_t Elements(const TensorSpec& tensor) {
  uint64_t elements = 1;
  for (uint64_t dimension : tensor.shape) elements *= dimension;
  return elements;
}

void WriteAndRead(std::string_view input) {
  const std::vector<TensorSpec> tensors = Tensors(input);
  const int fd = ::memfd_create("safetensors", MFD_CLOEXEC);
  Require(fd >= 0);
  auto writer = SafetensorsWriter::Create(fd, tensors, {{"key", std::string(input.substr(0, 9))}});
  if (writer.ok()) {
    std::set<std::string> names;
    for (size_t i = 0; i < tensors.size(); ++i) {
      names.insert(tensors[i].name);
      names.insert(tensors[i].aliases.begin(), tensors[i].aliases.end());
      const std::string data(Elements(tensors[i]) * SizeOf(tensors[i].dtype), 'd');
      Require(writer->Append(i, AsBytes(data)).ok());
    }
    Require((*std::move(writer)).Finish().ok());
    const auto header = ReadSafetensorsHeader(fd);
    Require(header.ok());
    std::set<std::string> found;
    for (const TensorEntry& tensor : header->tensors) found.insert(tensor.name);
    Require(found == names);
  }
  ::close(fd);
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  zeroshard::CheckHeader(input, 8);
  zeroshard::CheckHeader(input, 0);
  zeroshard::WriteAndRead(input);
  return 0;
}
