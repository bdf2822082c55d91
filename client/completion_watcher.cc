#include "client/completion_watcher.h"

#include <utility>
#include <vector>

namespace zeroshard {
namespace {

// Bounds what a missed Nudge costs.
constexpr absl::Duration kSlice = absl::Milliseconds(20);

}  // namespace

void CompletionWatcher::Add(uint64_t id, Callback callback) {
  {
    absl::MutexLock lock(&mu_);
    if (!stopped_) {
      waiting_.emplace(id, std::move(callback));
      if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
      return;
    }
  }
  callback(absl::CancelledError("the session was closed"));
}

void CompletionWatcher::Stop() {
  std::thread thread;
  std::multimap<uint64_t, Callback> waiting;
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
    thread = std::move(thread_);
  }
  completions_.Nudge();
  if (thread.joinable()) thread.join();
  {
    absl::MutexLock lock(&mu_);
    waiting.swap(waiting_);
  }
  for (auto& [id, callback] : waiting) callback(absl::CancelledError("the session was closed"));
}

void CompletionWatcher::Run() {
  while (true) {
    const uint32_t ticket = completions_.ticket();
    std::vector<uint64_t> ids;
    {
      absl::MutexLock lock(&mu_);
      const auto wanted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopped_ || !waiting_.empty();
      };
      mu_.Await(absl::Condition(&wanted));
      if (stopped_) return;
      for (const auto& [id, callback] : waiting_) {
        if (ids.empty() || ids.back() != id) ids.push_back(id);
      }
    }
    for (const uint64_t id : ids) {
      const std::optional<absl::Status> outcome = poll_(id);
      if (!outcome) continue;
      std::vector<Callback> ready;
      {
        absl::MutexLock lock(&mu_);
        const auto [begin, end] = waiting_.equal_range(id);
        for (auto it = begin; it != end; ++it) ready.push_back(std::move(it->second));
        waiting_.erase(begin, end);
      }
      for (Callback& callback : ready) callback(*outcome);
    }
    completions_.Await(ticket, kSlice);
  }
}

}  // namespace zeroshard
