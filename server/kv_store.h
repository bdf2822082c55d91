// KvStore: the key-value exchange by which the workers of a job find each other (Gloo's
// rendezvous).
//
// A value, once set, is kept until the job ends; setting it again to other bytes is an error, so
// keys carry the attempt at a rendezvous in their name. Bounded. Decision thread.

#ifndef ZEROSHARD_SERVER_KV_STORE_H_
#define ZEROSHARD_SERVER_KV_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard {

class KvStore {
 public:
  using Done = std::function<void(const absl::StatusOr<std::string>&)>;

  // ResourceExhausted past kMaxBytes in all; AlreadyExists for another value under the same key.
  absl::Status Set(const std::string& key, const std::string& value);

  // Calls `done` with the value: now, when it is set, or with DeadlineExceeded at `deadline`.
  // `owner` names the worker that waits.
  void Get(const std::string& key, uint32_t owner, absl::Duration deadline, Done done);

  // Fails all that wait. For the end of the job.
  void FailWaiters(const absl::Status& status);

  size_t keys() const { return values_.size(); }

  // Forgets what a dead worker waits for, without calling it.
  void DropWaiters(uint32_t owner);

  // Fails the waiters whose deadline has passed; returns the next deadline.
  absl::Duration Expire(absl::Duration now);

 private:
  static constexpr uint64_t kMaxBytes = uint64_t{64} << 20;

  struct Waiter {
    std::string key;
    uint32_t owner;
    absl::Duration deadline;
    Done done;
  };
  std::map<std::string, std::string> values_;
  std::vector<Waiter> waiters_;
  uint64_t bytes_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_KV_STORE_H_
