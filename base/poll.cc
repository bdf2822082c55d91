#include "base/poll.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {

absl::Status AwaitReady(int fd, short events, const Deadline& deadline,
                        std::string_view operation) {
  constexpr int64_t kMaxPollMillis = 3'600'000;
  while (true) {
    // Rounded up, so that the last wait does not spin through fractions of a millisecond.
    const int64_t millis =
        std::min(absl::ToInt64Milliseconds(absl::Ceil(deadline.Remaining(), absl::Milliseconds(1))),
                 kMaxPollMillis);
    pollfd entry = {fd, events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(millis));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return ErrnoError(errno, operation, "(poll)");
    if (ready == 0 && deadline.Passed()) {
      return absl::DeadlineExceededError(absl::StrCat(Abs(operation), ": timed out"));
    }
  }
}

}  // namespace zeroshard
