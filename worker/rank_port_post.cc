// The part of RankPort that writes requests to the board.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "worker/rank_port.h"
#include "worker/shard.h"

namespace zeroshard {
namespace {

GroupHyper ToHyper(const model::v1::GroupOptions& options) {
  return {.lr = options.lr(),
          .weight_decay = options.weight_decay(),
          .beta1 = options.beta1(),
          .beta2 = options.beta2(),
          .eps = options.eps(),
          .momentum = options.momentum(),
          .dampening = options.dampening(),
          .nesterov = options.nesterov() ? 1u : 0u,
          .bias_correction = options.bias_correction() ? 1u : 0u};
}

Presence ToPresence(const std::string& bytes, const Unit& unit) {
  const Presence full = FullPresence(unit);
  if (bytes.empty()) return full;
  Presence presence = {};
  std::memcpy(presence.data(), bytes.data(), bytes.size());
  for (uint32_t word = 0; word < kPresenceWords; ++word) presence[word] &= full[word];
  return presence;
}

}  // namespace

absl::Status RankPort::Gather(const Request& request) {
  const trainer::v1::Gather& gather = request.gather();
  ZS_RETURN_IF_ERROR(CheckUnits(gather.units()));
  ZS_ASSIGN_OR_RETURN(std::byte* const target, TargetOf(gather));
  if (!gather.alone()) PostOrder(request.id(), gather);
  for (uint32_t unit : gather.units()) {
    CountGather(unit);
    if (IsWindowed(unit, gather.alone())) Pin(request.id(), unit, +1);
  }
  posted_.push_back({.id = request.id(),
                     .kind = Posted::Kind::kGather,
                     .units = {gather.units().begin(), gather.units().end()},
                     .mark = 0,
                     .since = context_.now(),
                     .alone = gather.alone(),
                     .target = target});
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> RankPort::TargetOf(const trainer::v1::Gather& gather) const {
  const JobMemory& memory = context_.memory();
  if (gather.alone() || !HasNvmeParameters(memory.config())) return nullptr;
  const bool all_stay = std::ranges::all_of(
      gather.units(), [&](uint32_t unit) { return memory.plan().unit(unit).resident; });
  if (all_stay) return nullptr;
  if (gather.units_size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a gather of ", gather.units_size(),
                     " units; parameters on nvme are gathered one unit a request"));
  }
  const uint32_t unit = gather.units(0);
  const uint64_t bytes =
      memory.plan().unit(unit).shard.elements() * SizeOf(context_.layout().units()[unit].dtype);
  ZS_RETURN_IF_ERROR(CheckWindow(gather.window_offset(), bytes));
  return memory.writable_gradient_window(rank_) + gather.window_offset();
}

bool RankPort::IsWindowed(uint32_t unit, bool alone) const {
  if (device_ == nullptr) return true;
  const model::v1::EngineConfig& config = context_.memory().config();
  return alone && config.stage() == 3 &&
         !context_.layout().persistent(unit, config.persistence_threshold());
}

void RankPort::CountGather(uint32_t unit) {
  const model::v1::EngineConfig& config = context_.memory().config();
  if (config.stage() < 3) return;
  const uint64_t elements = context_.layout().units()[unit].data_elements;
  const bool persistent = context_.layout().persistent(unit, config.persistence_threshold());
  (persistent ? context_.counters().persistent_gather_elements
              : context_.counters().gather_elements) += elements;
}

// One word holds the request and the count, so that a request sent again changes nothing.
void RankPort::Pin(uint64_t id, uint32_t unit, int64_t change) const {
  if (context_.memory().plan().unit(unit).resident) return;
  std::atomic<uint64_t>& pin = context_.board().pins(rank_, unit);
  const uint64_t word = pin.load(std::memory_order_acquire);
  if (word >> 16 >= id) return;
  const auto count = static_cast<int64_t>(word & 0xffff) + change;
  pin.store(id << 16 | static_cast<uint64_t>(std::max<int64_t>(0, count)));
}

absl::Status RankPort::Release(const Request& request) {
  ZS_RETURN_IF_ERROR(CheckUnits(request.release().units()));
  bool copied = false;
  for (uint32_t unit : request.release().units()) {
    if (device_ != nullptr && !request.release().alone()) break;
    Pin(request.id(), unit, -1);
    if (context_.memory().plan().unit(unit).resident) continue;
    copied = true;
    context_.MarkDirty(unit);
  }
  if (copied) context_.RingAll();
  Complete(request.id(), RankPage::kOk);
  return absl::OkStatus();
}

void RankPort::PostOrder(uint64_t id, const trainer::v1::Gather& gather) {
  RankSlot& rank = slot();
  const std::optional<uint64_t> attempt_or = Attempt();
  if (!attempt_or.has_value()) return;
  const uint64_t attempt = *attempt_or;
  const uint64_t start = rank.order_start.load(std::memory_order_acquire);
  const uint64_t end = rank.order_end.load(std::memory_order_acquire);
  // Sent again after its worker died, and a later one stands in the order already.
  if (start >> 24 > (id & 0xffffffffff)) return;
  uint64_t index = end >> 32 == (attempt & 0xffffffff) ? end & 0xffffffff : 0;
  if (start >> 24 == (id & 0xffffffffff) && start != 0) {
    index = start & 0xffffff;  // sent again; its predecessor may have died in the middle of this
  } else {
    rank.order_start.store(id << 24 | (index & 0xffffff), std::memory_order_release);
  }
  for (uint32_t unit : gather.units()) {
    rank.order[index % kOrderRing].store(OrderEntry(attempt, index, unit));
    context_.CompareOrder(rank_, attempt, index, unit);
    ++index;
  }
  ZS_FAULT_POINT("worker.gather.before_order");
  rank.order_end.store(attempt << 32 | (index & 0xffffffff), std::memory_order_release);
}

absl::Status RankPort::Put(const Request& request) {
  const trainer::v1::Put& put = request.put();
  if (put.unit() >= context_.layout().units().size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unit ", put.unit(), " of ", context_.layout().units().size()));
  }
  const Unit& unit = context_.layout().units()[put.unit()];
  const uint64_t end = put.element_offset() + put.elements();
  const bool whole_grains = put.elements() % kGrainElements == 0 || end == unit.elements();
  if (put.element_offset() % kGrainElements != 0 || !whole_grains ||
      put.elements() > unit.elements() || end > unit.elements()) {
    return absl::InvalidArgumentError(absl::StrCat("put of elements [", put.element_offset(), ", ",
                                                   end, ") of ", context_.UnitName(put.unit()),
                                                   ", which has ", unit.elements(),
                                                   "; whole grains of ", kGrainElements, " only"));
  }
  ZS_RETURN_IF_ERROR(CheckWindow(put.window_offset(), put.elements() * SizeOf(unit.dtype)));
  puts_.push_back(request);
  return absl::OkStatus();
}

// One put of a rank is on the board at a time.
bool RankPort::PostPut() {
  if (puts_.empty()) return false;
  // The states that a step begins with have their manifest by then (Engine::PutsPosted).
  const model::v1::EngineConfig& config = context_.memory().config();
  if (config.nvme().durability() == model::v1::DURABILITY_POWER && HasArrived()) return false;
  const bool busy = std::any_of(posted_.begin(), posted_.end(), [&](const Posted& posted) {
    return posted.kind == Posted::Kind::kPut && !IsComplete(posted);
  });
  if (busy) return false;
  const trainer::v1::Put& put = puts_.front().put();
  RankSlot& rank = slot();
  const uint64_t tag = rank.put_tag.load(std::memory_order_acquire) + 1;
  rank.put_unit = put.unit();
  rank.put_offset = put.element_offset();
  rank.put_elements = put.elements();
  rank.put_window_offset = put.window_offset();
  ZS_FAULT_POINT("worker.put.before_post");
  rank.put_tag.store(tag, std::memory_order_release);
  posted_.push_back({.id = puts_.front().id(),
                     .kind = Posted::Kind::kPut,
                     .units = {put.unit()},
                     .mark = tag,
                     .since = context_.now()});
  puts_.pop_front();
  context_.RingAll();
  return true;
}

bool RankPort::PostQueued() {
  if (queue_.empty()) return false;
  const std::optional<uint64_t> attempt = Attempt();
  if (!attempt.has_value()) {
    queue_.clear();
    return false;
  }
  const Request& request = queue_.front();
  const uint64_t id = request.id();
  const bool again = id <= slot().posted.load(std::memory_order_acquire);
  if (request.has_scatter()) {
    if (again && device_ != nullptr) {
      Complete(id, RankPage::kOk);
    } else if (again) {
      const Tag tag = context_.board().contribution(request.scatter().unit(), rank_).tag.load();
      posted_.push_back(
          {request.id(), Posted::Kind::kScatter, {request.scatter().unit()}, tag, context_.now()});
    } else if (!PostScatter(request, *attempt)) {
      return false;
    }
  } else if (request.has_micro_end()) {
    const Tag tag = MakeTag(*attempt, request.micro_end().micro_step());
    if (!again && slot().micro_end.load() < tag) {
      ZS_FAULT_POINT("worker.micro_end");
      slot().micro_end.store(tag, std::memory_order_release);
      context_.MarkAllDirty();
      context_.RingAll();
    }
    Complete(request.id(), RankPage::kOk);
  } else if (absl::Status status = PostStep(request, *attempt); !status.ok()) {
    FailRequest(request.id(), status);
  }
  queue_.pop_front();
  ZS_FAULT_POINT("worker.request.before_posted");
  if (!again) slot().posted.store(id, std::memory_order_release);
  return true;
}

bool RankPort::PostScatter(const Request& request, uint64_t attempt) {
  const trainer::v1::Scatter& scatter = request.scatter();
  Contribution& contribution = context_.board().contribution(scatter.unit(), rank_);
  const Tag tag = MakeTag(attempt, scatter.micro_step());
  const Tag before = contribution.tag.load(std::memory_order_acquire);
  // A contribution is accepted once: what a restarted rank sends again was used already.
  const bool accepted = before >= tag || context_.IsConsumed(rank_, scatter.unit(), tag);
  if (!accepted) {
    if (AttemptOf(before) == attempt && !context_.IsConsumed(rank_, scatter.unit(), before)) {
      return false;
    }
    const Unit& unit = context_.layout().units()[scatter.unit()];
    contribution.window_offset = scatter.window_offset();
    contribution.weight = scatter.weight() == 0.0f ? 1.0f : scatter.weight();
    contribution.present = ToPresence(scatter.present(), unit);
    ZS_FAULT_POINT("worker.scatter.before_post");
    contribution.tag.store(tag, std::memory_order_release);
    ZS_FAULT_POINT("worker.scatter.after_post");
    context_.counters().scatter_elements += unit.data_elements;
    context_.MarkDirty(scatter.unit());
    ring_ = true;
  }
  if (device_ != nullptr) {
    Complete(request.id(), RankPage::kOk);
  } else {
    posted_.push_back(
        {request.id(), Posted::Kind::kScatter, {scatter.unit()}, tag, context_.now()});
  }
  return true;
}

absl::Status RankPort::PostStep(const Request& request, uint64_t attempt) {
  RankSlot& rank = slot();
  const trainer::v1::Step& step = request.step();
  const uint64_t arrival = rank.arrival.load(std::memory_order_acquire);
  const bool again = rank.arrival_request == request.id() && rank.arrival_attempt == arrival;
  if (again) {
    attempt = arrival;
  } else {
    ZS_RETURN_IF_ERROR(context_.memory().user_states().Write(
        rank_, attempt, context_.board().committed_attempt(),
        {reinterpret_cast<const std::byte*>(step.user_state().data()), step.user_state().size()}));
    rank.input.micro_steps = step.micro_steps();
    rank.input.groups = static_cast<uint32_t>(step.groups_size());
    rank.input.weight_total = step.weight_total();
    std::memset(rank.input.group, 0, sizeof(rank.input.group));
    for (int i = 0; i < step.groups_size(); ++i) rank.input.group[i] = ToHyper(step.groups(i));
    const Tag last = MakeTag(attempt, step.micro_steps() - 1);
    if (rank.micro_end.load() < last) rank.micro_end.store(last, std::memory_order_release);
    rank.arrival_attempt = attempt;
    rank.arrival_request = request.id();
    ZS_FAULT_POINT("worker.step.before_arrival");
    rank.arrival.store(attempt, std::memory_order_release);
    ZS_FAULT_POINT("worker.step.after_arrival");
    EngineCounters& counters = context_.counters();
    counters.prefetch_hits += step.prefetch_hits();
    counters.prefetch_misses += step.prefetch_misses();
    counters.wait.Add(absl::Microseconds(step.wait_us()));
    context_.MarkAllDirty();
    context_.RingAll();
  }
  posted_.push_back({request.id(), Posted::Kind::kStep, {}, attempt, context_.now()});
  return absl::OkStatus();
}

}  // namespace zeroshard
