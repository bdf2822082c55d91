// CompletionWatcher: calls back when requests complete. Its thread starts with the first callback;
// programs that only wait have none.
#ifndef ZEROSHARD_CLIENT_COMPLETION_WATCHER_H_
#define ZEROSHARD_CLIENT_COMPLETION_WATCHER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/completions.h"

namespace zeroshard {

class CompletionWatcher {
 public:
  using Callback = std::function<void(absl::Status)>;
  // The outcome of a request, or nothing while it has none.
  using Poll = std::function<std::optional<absl::Status>(uint64_t id)>;

  CompletionWatcher(Completions completions, Poll poll)
      : completions_(completions), poll_(std::move(poll)) {}
  ~CompletionWatcher() { Stop(); }

  // Any thread. After Stop the callback is called at once, with Cancelled.
  void Add(uint64_t id, Callback callback);
  // Ends the thread; what is still waited for is called back with Cancelled, on this thread.
  void Stop();

 private:
  void Run();

  const Completions completions_;
  const Poll poll_;

  absl::Mutex mu_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::multimap<uint64_t, Callback> waiting_ ABSL_GUARDED_BY(mu_);
  std::thread thread_ ABSL_GUARDED_BY(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_COMPLETION_WATCHER_H_
