#include "client/pending_requests.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "proto/trainer.pb.h"

namespace zeroshard {
namespace {

using trainer::v1::SessionRequest;

template <typename Units>
std::string UnitList(const Units& units) {
  constexpr int kShown = 8;
  if (units.size() == 1) return absl::StrCat("unit ", units[0]);
  if (units.size() <= kShown) return absl::StrCat("units ", absl::StrJoin(units, ", "));
  return absl::StrCat("units ", absl::StrJoin(units.begin(), units.begin() + kShown, ", "), " and ",
                      units.size() - kShown, " more");
}

std::string DescribeKind(const SessionRequest& request) {
  switch (request.kind_case()) {
    case SessionRequest::kHello:
      return "hello";
    case SessionRequest::kPut:
      return absl::StrCat("put of unit ", request.put().unit(), " from element ",
                          request.put().element_offset());
    case SessionRequest::kGather:
      return absl::StrCat(request.gather().alone()      ? "gather alone of "
                          : request.gather().prefetch() ? "prefetch of "
                                                        : "gather of ",
                          UnitList(request.gather().units()));
    case SessionRequest::kRelease:
      return absl::StrCat("release of ", UnitList(request.release().units()));
    case SessionRequest::kScatter:
      return absl::StrCat("scatter of unit ", request.scatter().unit(), ", micro-step ",
                          request.scatter().micro_step());
    case SessionRequest::kMicroEnd:
      return absl::StrCat("end of micro-step ", request.micro_end().micro_step());
    case SessionRequest::kStep:
      return "step";
    case SessionRequest::KIND_NOT_SET:
      break;
  }
  return "empty request";
}

}  // namespace

std::string DescribeRequest(const SessionRequest& request) {
  return absl::StrCat(DescribeKind(request), " (request ", request.id(), ")");
}

void PendingRequests::Add(SharedRequest request) {
  ZS_CHECK(!full() && request->id() == next_id(), "requests must be added in order");
  requests_.push_back(std::move(request));
}

void PendingRequests::Retire(const std::function<void(const SessionRequest&)>& failed) {
  for (SharedRequest& request : requests_) {
    if (request == nullptr) continue;
    const Completions::Outcome outcome = completions_.Look(request->id());
    if (outcome == Completions::Outcome::kPending) continue;
    if (outcome == Completions::Outcome::kFailed) failed(*request);
    request = nullptr;
  }
  while (!requests_.empty() && requests_.front() == nullptr) {
    requests_.pop_front();
    ++first_;
  }
  crowd_ = std::min<size_t>(2 * requests_.size() + 32, kMaxPendingRequests);
}

std::vector<SharedRequest> PendingRequests::Unfinished() const {
  std::vector<SharedRequest> unfinished;
  for (const SharedRequest& request : requests_) {
    if (request != nullptr && completions_.Look(request->id()) == Completions::Outcome::kPending) {
      unfinished.push_back(request);
    }
  }
  return unfinished;
}

std::string PendingRequests::Describe(uint64_t id) const {
  if (id >= first_ && id < next_id() && requests_[id - first_] != nullptr) {
    return DescribeRequest(*requests_[id - first_]);
  }
  return absl::StrCat("request ", id);
}

}  // namespace zeroshard
