// The part of JobHost by which daemons agree on the next generation of a job with a data plane, and
// its ranks' rendezvous between daemons.
#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "server/job_host.h"

namespace zeroshard {
namespace {

using cluster::v1::JoinReply;
using cluster::v1::JoinRequest;

// Between two questions whether all ranks of all nodes wait. A node that has not asked for longer
// than the lease has lost a rank meanwhile.
constexpr absl::Duration kAskPeriod = absl::Milliseconds(50);
constexpr absl::Duration kLease = absl::Seconds(1);

constexpr char kRanksPrefix[] = "ranks";

std::string KeyOfRanks(uint64_t generation, const std::string& key) {
  return absl::StrCat(kRanksPrefix, "/", generation, "/", key);
}

}  // namespace

void JobHost::Regroup() {
  regrouping_ = WantsGeneration(state_);
  if (!regrouping_) return;
  if (!keeps_store()) {
    return environment_.cluster->Join(MyJoin(), [this, alive = std::weak_ptr<const bool>(alive_)](
                                                    const absl::StatusOr<JoinReply>& reply) {
      if (!alive.expired()) OnRoundReply(reply);
    });
  }
  CheckRound();
  loop_.At(loop_.Now() + kAskPeriod, [this, alive = std::weak_ptr<const bool>(alive_)] {
    if (!alive.expired()) Regroup();
  });
}

// On node 0: whether all ranks of all nodes wait for the round.
void JobHost::CheckRound() {
  if (!WantsGeneration(state_)) return;
  std::vector<uint32_t> missing;
  uint64_t generation = state_.generation;
  for (uint32_t node = 1; node < plan_->placement.nodes; ++node) {
    const Member& member = members_[node];
    if (member.round != round_ + 1 || member.asked_at + kLease < loop_.Now()) {
      missing.push_back(node);
    }
    generation = std::max(generation, member.generation);
  }
  OnNodesMissing(missing);
  if (!missing.empty()) return;
  ++round_;
  agreed_ = generation + 1;
  Feed(GenerationAgreed{agreed_});
}

// On node 0, which hears of another one whose ranks wait.
absl::StatusOr<JoinReply> JobHost::OnRound(const JoinRequest& request) {
  if (state_.phase == JobPhase::kFailed) {
    return absl::FailedPreconditionError(absl::StrCat("job '", state_.name, "' has failed on ",
                                                      environment_.config->cluster.NodeName(0),
                                                      ": ", state_.reason));
  }
  Member& member = members_[request.member().node()];
  JoinReply reply;
  reply.set_keeper(job_id_);
  if (request.round() == round_ + 1) {
    member.round = request.round();
    member.generation = request.generation();
    member.asked_at = loop_.Now();
    CheckRound();
  }
  if (request.round() == round_) reply.set_generation(agreed_);
  if (request.round() == round_ || ended()) return reply;
  if (!WantsGeneration(state_)) reply.add_missing(0);
  for (uint32_t node = 1; node < plan_->placement.nodes; ++node) {
    if (members_[node].round != round_ + 1) reply.add_missing(node);
  }
  return reply;
}

void JobHost::OnRoundReply(const absl::StatusOr<JoinReply>& reply) {
  regrouping_ = false;
  if (ended()) return;
  if (reply.ok() && reply->generation() > 0) {
    ++round_;
    agreed_ = reply->generation();
    return Feed(GenerationAgreed{agreed_});
  }
  if (reply.ok()) {
    OnNodesMissing({reply->missing().begin(), reply->missing().end()});
  } else if (absl::IsUnavailable(reply.status()) || absl::IsDeadlineExceeded(reply.status())) {
    Feed(zeroshard::NodesMissing{{std::string(reply.status().message())}});
  } else if (WantsGeneration(state_)) {
    const std::string node = environment_.config->cluster.NodeName(0);
    return Feed(NodeLost{absl::FailedPreconditionError(absl::StrCat(
        "the part of ", node, " of job '", state_.name, "' is gone: ", reply.status().message()))});
  }
  if (regrouping_ || !WantsGeneration(state_)) return;
  regrouping_ = true;
  loop_.At(loop_.Now() + kAskPeriod, [this, alive = std::weak_ptr<const bool>(alive_)] {
    if (!alive.expired()) Regroup();
  });
}

void JobHost::TellFailed(Instant end) {
  if (!plan_->placement.spans() || !data_plane() || keeps_store() || !spawned_) return;
  JoinRequest request = MyJoin();
  request.set_failed(state_.reason);
  environment_.cluster->Join(request, [this, end, alive = std::weak_ptr<const bool>(alive_)](
                                          const absl::StatusOr<JoinReply>& reply) {
    const bool heard =
        !absl::IsUnavailable(reply.status()) && !absl::IsDeadlineExceeded(reply.status());
    if (heard || alive.expired() || ended() || loop_.Now() >= end) return;
    loop_.At(loop_.Now() + kAskPeriod, [this, end, alive] {
      if (!alive.expired()) TellFailed(end);
    });
  });
}

void JobHost::ForwardRendezvous(uint32_t rank, const trainer::v1::RendezvousRequest& request,
                                KvStore::Done done) {
  const std::string key = KeyOfRanks(state_.alive_since, request.key());
  if (request.has_value()) {
    cluster::v1::SetKeyRequest set;
    *set.mutable_member() = Self();
    set.set_key(key);
    set.set_value(request.value());
    return environment_.cluster->SetKey(
        set, [done = std::move(done),
              value = request.value()](const absl::StatusOr<cluster::v1::SetKeyReply>& reply) {
          done(reply.ok() ? absl::StatusOr<std::string>(value) : reply.status());
        });
  }
  cluster::v1::GetKeyRequest get;
  *get.mutable_member() = Self();
  get.set_key(key);
  get.set_timeout_ms(request.timeout_ms());
  get.set_worker(rank);
  environment_.cluster->GetKey(
      get, [done = std::move(done)](const absl::StatusOr<cluster::v1::GetKeyReply>& reply) {
        done(reply.ok() ? absl::StatusOr<std::string>(reply->value()) : reply.status());
      });
}

absl::StatusOr<std::pair<KvStore*, std::string>> JobHost::StoreOf(const std::string& key) {
  const std::vector<std::string> parts = absl::StrSplit(key, absl::MaxSplits('/', 2));
  uint64_t generation = 0;
  if (!data_plane() || parts.size() != 3 || parts[0] != kRanksPrefix ||
      !absl::SimpleAtoi(parts[1], &generation)) {
    return std::pair(&store_, key);
  }
  if (generation == state_.alive_since && state_.poison.ok()) {
    return std::pair(&rendezvous_, parts[2]);
  }
  return absl::AbortedError(
      state_.poison.ok()
          ? absl::StrCat("generation ", generation, " of job '", state_.name, "' has ended")
          : std::string(state_.poison.message()));
}

}  // namespace zeroshard
