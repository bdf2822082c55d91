#include "storage/io_backend_name.h"

#include "absl/strings/str_cat.h"
#include "base/strings.h"

namespace zeroshard {

absl::StatusOr<IoBackend> ParseIoBackend(std::string_view text) {
  for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kUring, IoBackend::kThreads}) {
    if (text == NameOf(backend)) return backend;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", Abs(text), "\" is no I/O backend; there are auto, uring, threads"));
}

std::string_view NameOf(IoBackend backend) {
  switch (backend) {
    case IoBackend::kAuto:
      return "auto";
    case IoBackend::kUring:
      return "uring";
    case IoBackend::kThreads:
      return "threads";
  }
  return "unknown";
}

}  // namespace zeroshard
