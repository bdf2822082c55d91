#include "device/cpu/lock_allowance.h"

#include <linux/capability.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// The number behind "\nKey:" and blanks; 0 where there is none.
uint64_t Field(std::string_view status, std::string_view key, int base) {
  for (size_t at = 0; (at = status.find(key, at)) != std::string_view::npos; at += key.size()) {
    if (at > 0 && status[at - 1] != '\n') continue;
    std::string_view rest = status.substr(at + key.size());
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t"), rest.size()));
    uint64_t value = 0;
    std::from_chars(rest.data(), rest.data() + rest.size(), value, base);
    return value;
  }
  return 0;
}

}  // namespace

uint64_t LockAllowance::left_bytes() const {
  if (unlimited) return UINT64_MAX;
  return limit_bytes > used_bytes ? limit_bytes - used_bytes : 0;
}

LockAllowance LockAllowanceOf(uint64_t limit, std::string_view status) {
  const bool capable = (Field(status, "CapEff:", 16) >> CAP_IPC_LOCK & 1) != 0;
  return {.unlimited = capable || limit == RLIM_INFINITY,
          .limit_bytes = limit,
          .used_bytes = Field(status, "VmLck:", 10) * 1024};
}

absl::StatusOr<LockAllowance> ReadLockAllowance() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    return ErrnoError(errno, "getrlimit", "RLIMIT_MEMLOCK");
  }
  std::ifstream file("/proc/self/status");
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::UnavailableError("/proc/self/status cannot be read");
  return LockAllowanceOf(limit.rlim_cur, text.str());
}

bool RaiseLockLimit(uint64_t bytes) {
  rlimit limit = {};
  const absl::StatusOr<LockAllowance> now = ReadLockAllowance();
  if (!now.ok() || ::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return false;
  if (limit.rlim_cur == limit.rlim_max || limit.rlim_max < now->used_bytes + bytes) return false;
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
}

std::string LockAdvice(const LockAllowance& allowance, uint64_t bytes) {
  const uint64_t needed = allowance.used_bytes + bytes;
  return absl::StrCat("RLIMIT_MEMLOCK is ", allowance.limit_bytes, " bytes, ", allowance.used_bytes,
                      " of them used, and ", needed,
                      " are needed: start the daemon with LimitMEMLOCK=", needed,
                      " in its systemd unit, or after `ulimit -l ", (needed + 1023) / 1024,
                      "`, or with the capability CAP_IPC_LOCK");
}

}  // namespace zeroshard
