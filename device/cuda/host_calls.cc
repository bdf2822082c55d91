#include "device/cuda/host_calls.h"

#include <utility>

namespace zeroshard {

HostCalls& HostCalls::Get() {
  static HostCalls& calls = *new HostCalls;
  return calls;
}

uintptr_t HostCalls::Add(uint64_t stream, std::function<void()> function) {
  absl::MutexLock lock(&mu_);
  const uintptr_t ticket = next_++;
  calls_[ticket] = {stream, std::move(function)};
  return ticket;
}

void HostCalls::Run(uintptr_t ticket) {
  std::function<void()> function;
  {
    absl::MutexLock lock(&mu_);
    const auto found = calls_.find(ticket);
    if (found == calls_.end()) return;
    function = std::move(found->second.function);
    calls_.erase(found);
  }
  function();
}

void HostCalls::Drop(uintptr_t ticket) {
  std::function<void()> dropped;  // destroyed after the lock is given up
  absl::MutexLock lock(&mu_);
  const auto found = calls_.find(ticket);
  if (found == calls_.end()) return;
  dropped = std::move(found->second.function);
  calls_.erase(found);
}

void HostCalls::DropStream(uint64_t stream) {
  absl::MutexLock lock(&mu_);
  for (auto call = calls_.begin(); call != calls_.end();) {
    call = call->second.stream == stream ? calls_.erase(call) : std::next(call);
  }
}

}  // namespace zeroshard
