#include "server/kv_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {

absl::Status KvStore::Set(const std::string& key, const std::string& value) {
  const auto it = values_.find(key);
  if (it != values_.end()) {
    if (it->second == value) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat("store: key '", key, "' holds another value"));
  }
  if (bytes_ + key.size() + value.size() > kMaxBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("store: more than ", kMaxBytes, " bytes"));
  }
  bytes_ += key.size() + value.size();
  values_[key] = value;
  std::vector<Waiter> woken;
  std::erase_if(waiters_, [&](Waiter& waiter) {
    if (waiter.key != key) return false;
    woken.push_back(std::move(waiter));
    return true;
  });
  for (Waiter& waiter : woken) waiter.done(value);
  return absl::OkStatus();
}

void KvStore::Get(const std::string& key, uint32_t owner, absl::Duration deadline, Done done) {
  if (const auto it = values_.find(key); it != values_.end()) return done(it->second);
  waiters_.push_back({key, owner, deadline, std::move(done)});
}

void KvStore::FailWaiters(const absl::Status& status) {
  for (Waiter& waiter : std::exchange(waiters_, {})) waiter.done(status);
}

void KvStore::DropWaiters(uint32_t owner) {
  std::erase_if(waiters_, [&](const Waiter& waiter) { return waiter.owner == owner; });
}

absl::Duration KvStore::Expire(absl::Duration now) {
  std::vector<Waiter> late;
  absl::Duration next = absl::InfiniteDuration();
  std::erase_if(waiters_, [&](Waiter& waiter) {
    if (waiter.deadline <= now) {
      late.push_back(std::move(waiter));
      return true;
    }
    next = std::min(next, waiter.deadline);
    return false;
  });
  for (Waiter& waiter : late) {
    waiter.done(absl::DeadlineExceededError(
        absl::StrCat("store: nobody set key '", waiter.key, "' in time")));
  }
  return next;
}

}  // namespace zeroshard
