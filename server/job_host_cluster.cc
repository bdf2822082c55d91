// The part of JobHost that talks to the other daemons of a job that spans several.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/version.h"
#include "server/job_host.h"

namespace zeroshard {
namespace {

using cluster::v1::JoinReply;
using cluster::v1::JoinRequest;

// Between two questions whether everybody is here, or gone.
constexpr absl::Duration kAskPeriod = absl::Milliseconds(50);

template <typename Texts>
std::vector<std::string> ToVector(const Texts& texts) {
  return {texts.begin(), texts.end()};
}

bool IsPassing(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsNotFound(status) ||
         absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

}  // namespace

cluster::v1::Member JobHost::Self() const {
  cluster::v1::Member self;
  self.set_job(state_.name);
  self.set_node(plan_->placement.node);
  self.set_instance(job_id_);
  self.set_keeper(keeper_);
  return self;
}

JoinRequest JobHost::MyJoin() const {
  JoinRequest request;
  *request.mutable_member() = Self();
  request.set_version(kVersion);
  request.set_devices(plan_->placement.workers);
  for (const std::string& address : environment_.config->cluster.addresses) {
    request.add_addresses(address);
  }
  request.set_world_size(state_.spec.world_size);
  request.set_local_ranks(state_.spec.local_ranks);
  request.set_forward_only(state_.spec.forward_only);
  for (const std::string& line : state_.spec.parameters) request.add_parameters(line);
  for (const std::string& line : state_.spec.config) request.add_config(line);
  request.set_leaving(state_.phase == JobPhase::kLeaving);
  if (WantsGeneration(state_)) AddRound(request);
  return request;
}

// What the sender says otherwise than this node; "" when nothing.
std::string JobHost::DifferenceTo(const JoinRequest& request) const {
  const ClusterConfig& cluster = environment_.config->cluster;
  const std::string here = cluster.NodeName(plan_->placement.node);
  const std::string there = cluster.NodeName(request.member().node());
  if (request.version() != kVersion) {
    return absl::StrCat("the build is ", kVersion, " on ", here, " but ", request.version(), " on ",
                        there);
  }
  JobSpec spec;
  spec.world_size = request.world_size();
  spec.local_ranks = request.local_ranks();
  spec.forward_only = request.forward_only();
  spec.parameters = ToVector(request.parameters());
  spec.config = ToVector(request.config());
  if (const std::string text = Difference(state_.spec, here, spec, there); !text.empty()) {
    return text;
  }
  if (request.devices() != plan_->placement.workers) {
    return absl::StrCat("the daemon has ", plan_->placement.workers, " devices on ", here, " but ",
                        request.devices(), " on ", there, "; give every daemon as many");
  }
  const std::vector<std::string> addresses = ToVector(request.addresses());
  if (addresses != cluster.addresses) {
    return absl::StrCat("cluster.addresses is ", absl::StrJoin(cluster.addresses, ", "), " on ",
                        here, " but ", absl::StrJoin(addresses, ", "), " on ", there);
  }
  return "";
}

// Whether the sender is one of this run of the job.
absl::Status JobHost::CheckMember(const cluster::v1::Member& member) {
  const std::string there = environment_.config->cluster.NodeName(member.node());
  const auto it = members_.find(member.node());
  if (it != members_.end() && it->second.instance == member.instance() &&
      (member.keeper() == 0 || member.keeper() == job_id_)) {
    return absl::OkStatus();
  }
  const absl::Status status = absl::FailedPreconditionError(
      absl::StrCat(there, " speaks of another run of job '", state_.name,
                   "': the part of one daemon is gone; end the job with `zeroshard remove ",
                   state_.name, " --force` on every node, and attach again"));
  if (it != members_.end() && data_plane() && state_.ever_ready) {
    Feed(NodeLost{status});
  } else if (it != members_.end()) {
    Feed(GenerationPoisoned{state_.generation, status});
  }
  return status;
}

std::vector<uint32_t> JobHost::NodesMissing() const {
  std::vector<uint32_t> missing;
  for (uint32_t node = 1; node < plan_->placement.nodes; ++node) {
    if (!members_.contains(node)) missing.push_back(node);
  }
  return missing;
}

absl::StatusOr<JoinReply> JobHost::OnJoin(const JoinRequest& request) {
  const uint32_t node = request.member().node();
  if (!regions_ || !keeps_store()) {
    return absl::NotFoundError(
        absl::StrCat("job '", state_.name, "' has not started on ",
                     environment_.config->cluster.NodeName(plan_->placement.node)));
  }
  if (const std::string difference = DifferenceTo(request); !difference.empty()) {
    const absl::Status status = absl::FailedPreconditionError(
        absl::StrCat("the nodes of job '", state_.name, "' disagree: ", difference));
    // A job that runs has nothing to do with who asks now.
    if (!spawned_) Feed(GenerationPoisoned{state_.generation, status});
    return status;
  }
  if (node == 0 || node >= plan_->placement.nodes) {
    return absl::InvalidArgumentError(absl::StrCat("node ", node, " has no part in the job"));
  }
  // Until all are here, an attach that was given up may be tried again.
  if (!spawned_) members_[node] = Member{.instance = request.member().instance()};
  ZS_RETURN_IF_ERROR(CheckMember(request.member()));
  if (request.round() > 0) return OnRound(request);
  members_[node].left |= request.leaving();
  JoinReply reply;
  reply.set_keeper(job_id_);
  if (!request.failed().empty()) {
    Feed(NodeLost{absl::FailedPreconditionError(
        absl::StrCat("the part of ", environment_.config->cluster.NodeName(node), " of job '",
                     state_.name, "' is over: ", request.failed()))});
    return reply;
  }
  const std::vector<uint32_t> missing = NodesMissing();
  for (const uint32_t other : missing) reply.add_missing(other);
  OnNodesMissing(missing);
  CheckAllLeft();
  reply.set_all_left(ended());
  return reply;
}

void JobHost::CheckAllLeft() {
  const bool all = std::all_of(members_.begin(), members_.end(),
                               [](const auto& member) { return member.second.left; });
  if (all && state_.phase == JobPhase::kLeaving) Feed(NodesLeft{});
}

void JobHost::OnNodesMissing(const std::vector<uint32_t>& missing) {
  zeroshard::NodesMissing input;
  for (const uint32_t node : missing) {
    if (node == plan_->placement.node) continue;
    input.nodes.push_back(environment_.config->cluster.NodeName(node));
  }
  const bool start = input.nodes.empty() && !spawned_ && !ended();
  if (start) SpawnWorkers();
  Feed(std::move(input));
}

void JobHost::AskToJoin() {
  if (ended() || (spawned_ && state_.phase != JobPhase::kLeaving)) return;
  environment_.cluster->Join(MyJoin(), [this, alive = std::weak_ptr<const bool>(alive_)](
                                           const absl::StatusOr<JoinReply>& reply) {
    if (!alive.expired()) OnJoinReply(reply);
  });
}

void JobHost::AskAgain() {
  loop_.At(loop_.Now() + kAskPeriod, [this, alive = std::weak_ptr<const bool>(alive_)] {
    if (!alive.expired()) AskToJoin();
  });
}

void JobHost::OnJoinReply(const absl::StatusOr<JoinReply>& reply) {
  if (ended()) return;
  if (state_.phase == JobPhase::kLeaving) {
    // Without a keeper nobody is left who waits for this node.
    const bool gone = !reply.ok() && !absl::IsUnavailable(reply.status()) &&
                      !absl::IsDeadlineExceeded(reply.status());
    return gone || (reply.ok() && reply->all_left()) ? Feed(NodesLeft{}) : AskAgain();
  }
  if (reply.ok()) {
    keeper_ = reply->keeper();
    OnNodesMissing({reply->missing().begin(), reply->missing().end()});
    return spawned_ ? void() : AskAgain();
  }
  if (!IsPassing(reply.status())) return Feed(StartFailed{reply.status()});
  if (absl::IsUnavailable(reply.status())) {
    Feed(zeroshard::NodesMissing{{std::string(reply.status().message())}});
  }
  AskAgain();
}

absl::Status JobHost::OnSetKey(const cluster::v1::SetKeyRequest& request) {
  ZS_RETURN_IF_ERROR(CheckMember(request.member()));
  ZS_ASSIGN_OR_RETURN(const auto place, StoreOf(request.key()));
  return place.first == &store_ ? store_.Set(request.key(), request.value())
                                : SetRendezvousKey(place.second, request.value());
}

void JobHost::OnGetKey(const cluster::v1::GetKeyRequest& request, KvStore::Done done) {
  if (absl::Status member = CheckMember(request.member()); !member.ok()) return done(member);
  const auto place = StoreOf(request.key());
  if (!place.ok()) return done(place.status());
  place->first->Get(place->second, request.worker(),
                    loop_.Now() + absl::Milliseconds(request.timeout_ms()), std::move(done));
  ArmTimer();
}

void JobHost::ForwardStore(uint32_t w, const internal::v1::StoreRequest& request,
                           KvStore::Done done) {
  // A keeper without the job will not get it back.
  const auto finish = [this, done = std::move(done), alive = std::weak_ptr<const bool>(alive_)](
                          const absl::StatusOr<std::string>& value) {
    if (alive.expired()) return;
    if (!absl::IsNotFound(value.status())) return done(value);
    done(absl::FailedPreconditionError(absl::StrCat("job '", state_.name, "' has ended on ",
                                                    environment_.config->cluster.NodeName(0))));
  };
  if (request.has_value()) {
    cluster::v1::SetKeyRequest set;
    *set.mutable_member() = Self();
    set.set_key(request.key());
    set.set_value(request.value());
    return environment_.cluster->SetKey(
        set,
        [finish, value = request.value()](const absl::StatusOr<cluster::v1::SetKeyReply>& reply) {
          finish(reply.ok() ? absl::StatusOr<std::string>(value) : reply.status());
        });
  }
  cluster::v1::GetKeyRequest get;
  *get.mutable_member() = Self();
  get.set_key(request.key());
  get.set_timeout_ms(request.timeout_ms());
  get.set_worker(Global(w));
  environment_.cluster->GetKey(
      get, [finish](const absl::StatusOr<cluster::v1::GetKeyReply>& reply) {
        finish(reply.ok() ? absl::StatusOr<std::string>(reply->value()) : reply.status());
      });
}

}  // namespace zeroshard
