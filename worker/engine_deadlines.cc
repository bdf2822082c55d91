// Deadlines and counters of the engine.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/engine.h"

namespace zeroshard {
namespace {

void CopyBuckets(const LatencyHistogram& histogram,
                 google::protobuf::RepeatedField<uint64_t>* field) {
  field->Assign(histogram.buckets().begin(), histogram.buckets().end());
}

}  // namespace

void Engine::OnRankDied(uint32_t rank) {
  // Nothing is lost by a rank that has left between two steps.
  if (device_ != nullptr && HasBegun(rank)) Abort(absl::StrCat("rank ", rank, " is gone"));
  if (ports_[rank] != nullptr) ports_[rank]->Leave();
}

void Engine::Tick() {
  if (tier_ != nullptr) tier_->Tick();
  if (!context_.poison().ok()) return;
  const absl::Duration timeout =
      absl::Milliseconds(context_.memory().config().collective_timeout_ms());
  if (timeout == absl::ZeroDuration()) return;
  CheckMesh(timeout);
  if (context_.is_island_leader()) CheckArrivals(timeout);
  for (uint32_t rank = 0; rank < ports_.size(); ++rank) {
    if (ports_[rank] != nullptr) CheckScatters(rank, timeout);
  }
  if (device_ != nullptr) CheckSums(timeout);
  if (bridge_ != nullptr) {
    const auto oldest = bridge_->OldestPartial();
    if (oldest.has_value() && context_.now() - oldest->since >= timeout) {
      CheckGradients(absl::StrCat("worker ", oldest->peer), oldest->unit, oldest->tag, timeout);
    }
  }
  if (!context_.poison().ok()) Advance();
}

// Whoever waits for other islands, and cannot hear of them.
void Engine::CheckMesh(absl::Duration timeout) {
  if (!mesh_lost_at_.has_value() || context_.now() - *mesh_lost_at_ < timeout) return;
  const bool waiting = std::any_of(ports_.begin(), ports_.end(), [](const auto& port) {
    return port != nullptr && port->HasRequests();
  });
  if (!waiting) return;
  context_.PoisonWithoutNodes(absl::UnavailableError(absl::StrCat(
      "step ", context_.board().numbers().step + 1,
      ": no connection to the other workers of the job for ",
      absl::FormatDuration(context_.now() - *mesh_lost_at_), ": ", mesh_reason_.message())));
}

// A rank that has not arrived while others wait, and was not heard of for as long, is stuck.
void Engine::CheckArrivals(absl::Duration timeout) {
  const Board& board = context_.board();
  const uint32_t ranks = context_.memory().ranks();
  activity_.resize(ranks);
  active_at_.resize(ranks, context_.now());
  bool waiting = false;
  std::vector<std::string> missing;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const RankSlot& slot = board.rank(rank);
    const uint64_t activity = slot.activity.load(std::memory_order_relaxed);
    if (activity != activity_[rank]) {
      activity_[rank] = activity;
      active_at_[rank] = context_.now();
    }
    if (slot.arrival.load() == attempt_) {
      waiting = true;
      continue;
    }
    if (slot.attached.load() == 0 || context_.now() - active_at_[rank] < timeout) continue;
    const uint64_t gathers = slot.order_end.load() & 0xffffffff;
    std::string place =
        gathers == 0 ? std::string("before its first gather")
                     : absl::StrCat("after gather ", gathers, " of ",
                                    context_.UnitName(static_cast<uint32_t>(
                                        slot.order[(gathers - 1) % kOrderRing].load() & 0xffffff)));
    missing.push_back(absl::StrCat("rank ", rank, " (", place, ")"));
  }
  if (!waiting) {
    waiting_since_.reset();
    return;
  }
  if (!waiting_since_.has_value()) waiting_since_ = context_.now();
  if (missing.empty() || context_.now() - *waiting_since_ < timeout) return;
  context_.Poison(absl::DeadlineExceededError(
      absl::StrCat("step ", board.numbers().step + 1, ": not arrived within ",
                   absl::FormatDuration(timeout), ": ", absl::StrJoin(missing, ", "))));
}

void Engine::CheckScatters(uint32_t rank, absl::Duration timeout) {
  const std::optional<RankPort::Waiting> oldest = ports_[rank]->OldestScatter();
  if (!oldest.has_value() || context_.now() - oldest->since < timeout) return;
  CheckGradients(absl::StrCat("rank ", rank), oldest->unit, oldest->tag, timeout);
}

void Engine::CheckGradients(const std::string& waiter, uint32_t unit, Tag tag,
                            absl::Duration timeout) {
  std::vector<std::string> missing;
  for (uint32_t other = 0; other < context_.memory().ranks(); ++other) {
    // What other islands' ranks did not send is seen there.
    if (!context_.memory().in_island(context_.memory().start().ranks(other).home_worker()))
      continue;
    const RankSlot& slot = context_.board().rank(other);
    if (slot.attached.load() == 0) return;  // the server waits for its successor
    const bool sent = context_.board().contribution(unit, other).tag.load() >= tag ||
                      slot.micro_end.load() >= tag;
    if (!sent) missing.push_back(absl::StrCat("rank ", other));
  }
  if (missing.empty()) return;
  context_.Poison(absl::DeadlineExceededError(absl::StrCat(
      "step ", context_.board().numbers().step + 1, ", micro-step ", MicroStepOf(tag), ": ", waiter,
      " waits since ", absl::FormatDuration(timeout), " for the gradient of ",
      context_.UnitName(unit), " from ", absl::StrJoin(missing, ", "))));
}

internal::v1::Stats Engine::Stats() const {
  const JobNumbers& numbers = context_.board().numbers();
  const EngineCounters& counters = context_.counters();
  internal::v1::Stats stats;
  stats.set_step(numbers.step);
  stats.set_updates(numbers.updates);
  stats.set_skipped(numbers.skipped);
  stats.set_loss_scale(numbers.loss_scale);
  stats.set_grad_norm(numbers.grad_norm);
  stats.set_gather_elements(counters.gather_elements);
  stats.set_persistent_gather_elements(counters.persistent_gather_elements);
  stats.set_scatter_elements(counters.scatter_elements);
  stats.set_step_gather_elements(counters.step_gather_elements);
  stats.set_wire_bytes(counters.wire_bytes);
  stats.set_copied_bytes(counters.copied_bytes);
  stats.set_prefetch_hits(counters.prefetch_hits);
  stats.set_prefetch_misses(counters.prefetch_misses);
  const absl::StatusOr<uint64_t> window = AllocatedBytes(context_.memory().window_fd());
  if (window.ok()) stats.set_window_bytes(*window);
  stats.set_pinned_bytes(context_.memory().pins().pinned_bytes());
  stats.set_unpinned_bytes(context_.memory().pins().unpinned_bytes());
  AddTierStats(stats);
  CopyBuckets(counters.gather, stats.mutable_gather_us());
  CopyBuckets(counters.scatter, stats.mutable_scatter_us());
  CopyBuckets(counters.step, stats.mutable_step_us());
  CopyBuckets(counters.wait, stats.mutable_wait_us());
  return stats;
}

}  // namespace zeroshard
