// How much memory this process may lock now: RLIMIT_MEMLOCK, unless it has CAP_IPC_LOCK, less what
// it has locked.
#ifndef ZEROSHARD_DEVICE_CPU_LOCK_ALLOWANCE_H_
#define ZEROSHARD_DEVICE_CPU_LOCK_ALLOWANCE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace zeroshard {

struct LockAllowance {
  bool unlimited = false;  // the capability, or no limit
  uint64_t limit_bytes = 0;
  uint64_t used_bytes = 0;  // address space, also of pages that are not there yet

  // UINT64_MAX where nothing limits it.
  uint64_t left_bytes() const;
};

// From a limit (RLIM_INFINITY for none) and the text of /proc/<pid>/status. Pure. Inside of a user
// namespace the capability does not count, which the text does not show.
LockAllowance LockAllowanceOf(uint64_t limit, std::string_view status);

// This process's.
absl::StatusOr<LockAllowance> ReadLockAllowance();

// Raises this process's limit to its hard limit if that lets `bytes` more be locked. Returns
// whether it did.
bool RaiseLockLimit(uint64_t bytes);

// What to do so that `bytes` more can be locked: a clause with the limit, its use and what is
// needed, in the words of systemd and of the shell.
std::string LockAdvice(const LockAllowance& allowance, uint64_t bytes);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_LOCK_ALLOWANCE_H_
