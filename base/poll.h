// Waiting for one descriptor to become ready, with a deadline. Any thread.

#ifndef ZEROSHARD_BASE_POLL_H_
#define ZEROSHARD_BASE_POLL_H_

#include <string_view>

#include "absl/status/status.h"
#include "base/deadline.h"

namespace zeroshard {

// Returns OK once poll(2) reports any of `events` (POLLIN, POLLOUT), an error or a hang-up for
// `fd`: the call that follows tells which. DeadlineExceeded, with `operation` in its message, at
// `deadline`.
absl::Status AwaitReady(int fd, short events, const Deadline& deadline, std::string_view operation);

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_POLL_H_
