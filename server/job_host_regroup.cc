// The part of JobHost by which daemons agree on the next generation of a job with a data plane, or
// on the mirror that it goes back to before, and its ranks' rendezvous between daemons.
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

cluster::v1::MirrorPoint ToProto(const MirrorPoint& point) {
  cluster::v1::MirrorPoint out;
  out.set_attempt(point.attempt);
  out.set_step(point.step);
  return out;
}

MirrorPoint FromProto(const cluster::v1::MirrorPoint& point) {
  return {.attempt = point.attempt(), .step = point.step()};
}

}  // namespace

void JobHost::AddRound(JoinRequest& request) const {
  request.set_round(round_ + 1);
  request.set_generation(state_.generation);
  request.set_lost(state_.lost);
  for (const MirrorPoint& point : CommonMirrors()) *request.add_mirrors() = ToProto(point);
  request.set_attempt(regions_->LastAttempt());
}

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
  std::string lost = state_.lost;
  for (uint32_t node = 1; node < plan_->placement.nodes; ++node) {
    const Member& member = members_[node];
    if (member.round != round_ + 1 || member.asked_at + kLease < loop_.Now()) {
      missing.push_back(node);
    }
    generation = std::max(generation, member.generation);
    if (lost.empty()) lost = member.lost;
  }
  OnNodesMissing(missing);
  if (!missing.empty()) return;
  if (!lost.empty()) return AgreeToGoBack(lost);
  ++round_;
  agreed_ = generation + 1;
  Feed(GenerationAgreed{agreed_});
}

// On node 0, when all ranks of all nodes wait and a node has lost something.
void JobHost::AgreeToGoBack(const std::string& lost) {
  std::vector<std::vector<MirrorPoint>> mirrors = {CommonMirrors()};
  // An attempt that is decided may be committed meanwhile, and workers that were told to go back
  // the last time may still be about to.
  uint64_t attempt = regions_->LastAttempt() + 1;
  if (agreed_back_.has_value()) attempt = std::max(attempt, agreed_back_->committed_as + 1);
  for (uint32_t node = 1; node < plan_->placement.nodes; ++node) {
    mirrors.push_back(members_[node].mirrors);
    attempt = std::max(attempt, members_[node].attempt + 1);
  }
  const std::optional<MirrorPoint> newest = NewestOf(CommonPoints(mirrors));
  if (!newest.has_value()) {
    return Feed(NodeLost{absl::DataLossError(absl::StrCat(
        lost, " of job '", state_.name,
        "': what it held is lost, and the mirrors of the nodes have no step in common; "
        "`zeroshard remove ",
        state_.name, " --force` on every node, start it anew"))});
  }
  ++round_;
  agreed_ = 0;
  agreed_back_ = GoBackAgreed{.mirror = *newest, .committed_as = attempt, .lost = lost};
  Feed(*agreed_back_);
}

// On node 0, which hears of another one whose ranks wait.
absl::StatusOr<JoinReply> JobHost::OnRound(const JoinRequest& request) {
  if (request.round() == round_ + 1 && state_.phase != JobPhase::kFailed) {
    Member& member = members_[request.member().node()];
    member.round = request.round();
    member.generation = request.generation();
    member.asked_at = loop_.Now();
    member.lost = request.lost();
    member.mirrors.clear();
    for (const auto& point : request.mirrors()) member.mirrors.push_back(FromProto(point));
    member.attempt = request.attempt();
    CheckRound();
  }
  if (state_.phase == JobPhase::kFailed) {
    return absl::FailedPreconditionError(absl::StrCat("job '", state_.name, "' has failed on ",
                                                      environment_.config->cluster.NodeName(0),
                                                      ": ", state_.reason));
  }
  JoinReply reply;
  reply.set_keeper(job_id_);
  if (request.round() == round_ && agreed_ > 0) {
    reply.set_generation(agreed_);
  } else if (request.round() == round_ && agreed_back_.has_value()) {
    cluster::v1::GoBack& back = *reply.mutable_go_back();
    *back.mutable_mirror() = ToProto(agreed_back_->mirror);
    back.set_committed_as(agreed_back_->committed_as);
    back.set_lost(agreed_back_->lost);
  }
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
  if (reply.ok() && reply->has_go_back()) {
    const cluster::v1::GoBack& back = reply->go_back();
    ++round_;
    return Feed(GoBackAgreed{FromProto(back.mirror()), back.committed_as(), back.lost()});
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
