// PendingRequests: the requests of a session that have no completion yet, kept to be sent again
// when the worker is replaced, and to name them in errors.
//
// At most kMaxPendingRequests: request N uses the completion slot of N - kMaxPendingRequests, which
// must be complete. Not synchronised.
#ifndef ZEROSHARD_CLIENT_PENDING_REQUESTS_H_
#define ZEROSHARD_CLIENT_PENDING_REQUESTS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/completions.h"

namespace zeroshard {

namespace trainer::v1 {
class SessionRequest;  // proto/trainer.pb.h
}  // namespace trainer::v1

// Immutable once sent: shared with the stream that writes it.
using SharedRequest = std::shared_ptr<const trainer::v1::SessionRequest>;

// "scatter of unit 3, micro-step 0 (request 17)".
std::string DescribeRequest(const trainer::v1::SessionRequest& request);

class PendingRequests {
 public:
  explicit PendingRequests(Completions completions) : completions_(completions) {}

  uint64_t next_id() const { return first_ + requests_.size(); }
  // No request may be added until Retire finds some complete.
  bool full() const { return requests_.size() >= kMaxPendingRequests; }
  // So many were added since the last Retire that it pays to call it: keeps the cost of each Add
  // constant on average.
  bool crowded() const { return requests_.size() >= crowd_; }
  // `request` must have the id next_id(), and full() must be false.
  void Add(SharedRequest request);
  // Forgets completed requests, and calls `failed` for each one that failed.
  void Retire(const std::function<void(const trainer::v1::SessionRequest&)>& failed);
  // Those without a completion, in the order of their ids.
  std::vector<SharedRequest> Unfinished() const;
  // As DescribeRequest, or "request 17" when it is not known any more.
  std::string Describe(uint64_t id) const;

 private:
  Completions completions_;
  uint64_t first_ = 1;  // id of requests_.front()
  size_t crowd_ = 32;
  std::deque<SharedRequest> requests_;  // null: retired behind one that is not
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_PENDING_REQUESTS_H_
