#include "tests/device/cpu/locked_bytes.h"

#include <unistd.h>

#include "base/check.h"
#include "device/cpu/lock_allowance.h"
#include "tests/storage/denied_syscalls.h"

namespace zeroshard {

uint64_t LockedBytes() {
  const absl::StatusOr<LockAllowance> now = ReadLockAllowance();
  ZS_CHECK(now.ok(), "/proc/self/status");
  return now->used_bytes;
}

std::string RunWithLockLimit(const rlimit& limit, const std::function<std::string()>& function) {
  return RunWithDeniedCalls({}, 0, [&]() -> std::string {
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "setrlimit";
    // Root is not held to the limit.
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return "setresuid";
    return function();
  });
}

}  // namespace zeroshard
