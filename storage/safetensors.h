// Safetensors files: written while the tensors stream by, and read strictly.
//
// The format is that of huggingface.co/docs/safetensors: 8 bytes length of the header, the header
// (JSON: name -> dtype, shape, data_offsets), the data without holes. A tied parameter is written
// whole under each of its names, because the format has no aliases; `__metadata__` names the
// original. Format page: docs/safetensors.md.
#ifndef ZEROSHARD_STORAGE_SAFETENSORS_H_
#define ZEROSHARD_STORAGE_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"

namespace zeroshard {

// The format's own bound on its header.
inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;

struct TensorSpec {
  std::string name;
  std::vector<std::string> aliases;
  std::vector<uint64_t> shape;
  DType dtype = DType::kFloat32;
};

// Writes one file. One thread at a time; the first error sticks. Memory: the header, nothing of the
// data.
class SafetensorsWriter {
 public:
  // Writes the header into `fd` (open for writing, empty, stays the caller's) and reserves the
  // space of all data. `metadata` becomes part of `__metadata__`, beside `format` = `pt` and one
  // `alias:NAME` for each alias. InvalidArgument for names or metadata that are not UTF-8, a name
  // used twice, a shape that overflows, too large a header.
  static absl::StatusOr<SafetensorsWriter> Create(
      int fd, const std::vector<TensorSpec>& tensors,
      const std::map<std::string, std::string>& metadata);

  // Appends elements to tensor `tensor` (index into `tensors`). Tensors may be written in any
  // order, the pieces of one in theirs. InvalidArgument past the tensor's end.
  absl::Status Append(size_t tensor, std::span<const std::byte> data);

  // FailedPrecondition when a tensor is not complete. Syncs. Returns the length of the file.
  absl::StatusOr<uint64_t> Finish() &&;

 private:
  struct Target {
    std::string name;
    uint64_t bytes = 0;
    uint64_t written = 0;
    std::vector<uint64_t> offsets;  // in the file: of the tensor and its aliases
  };

  SafetensorsWriter() = default;

  int fd_ = -1;
  std::string path_;  // for messages
  uint64_t file_bytes_ = 0;
  std::vector<Target> targets_;
  absl::Status status_;
};

// One tensor as a header describes it; also of data types that this program does not train.
struct TensorEntry {
  std::string name;
  std::string dtype;  // "F32", "BF16", "F16", "I64", ...
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // bytes, from the beginning of the data
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // in order of `begin`, then `end`
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  // of the data in the file
};

// Checks a whole file's header against all rules of the format: known data types, sizes that match
// the shapes, no holes, no overlap, no name twice, nothing after the data. `header` is the JSON
// text, `data_bytes` the length of what follows it. Pure. InvalidArgument says what is wrong.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view header,
                                                         uint64_t data_bytes);

// Reads and checks the header of a file.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(int fd);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_SAFETENSORS_H_
