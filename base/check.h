// ZS_CHECK: a broken invariant, that is a bug of this program, ends the process with a message.
//
// Never for what a caller, a peer, a file or the machine can cause: those are absl::Status. The
// server must not check anything that a request can influence.

#ifndef ZEROSHARD_BASE_CHECK_H_
#define ZEROSHARD_BASE_CHECK_H_

#include <string_view>

namespace zeroshard {

// Writes "check failed" with the place to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              std::string_view message);

}  // namespace zeroshard

// Active in every build mode. `message` (a string) is evaluated only on failure.
#define ZS_CHECK(condition, message)                                       \
  do {                                                                     \
    if (!(condition)) [[unlikely]] {                                       \
      ::zeroshard::CheckFailed(__FILE__, __LINE__, #condition, (message)); \
    }                                                                      \
  } while (false)

#endif  // ZEROSHARD_BASE_CHECK_H_
