// The names of the implementations of IoQueue, for configuration. Pure; any thread.
#ifndef ZEROSHARD_STORAGE_IO_BACKEND_NAME_H_
#define ZEROSHARD_STORAGE_IO_BACKEND_NAME_H_

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace zeroshard {

// The values of `io_backend`: "auto", "uring", "threads".
enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

// InvalidArgument with the values there are.
absl::StatusOr<IoBackend> ParseIoBackend(std::string_view text);
std::string_view NameOf(IoBackend backend);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_BACKEND_NAME_H_
