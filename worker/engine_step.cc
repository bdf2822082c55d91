// The step boundary: from the last gradient to the commit.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/status.h"
#include "worker/engine.h"
#include "worker/merge_records.h"
#include "worker/step_decision.h"

namespace zeroshard {
namespace {

constexpr uint32_t kMixedGroups = ~uint32_t{0};

// The arguments of a step's updates, each combination once.
class StepArgs {
 public:
  explicit StepArgs(const Decision& decision) : decision_(decision) {}

  // Of the `count`-th update of a parameter of `group`.
  uint32_t IndexOf(uint32_t group, uint64_t count) {
    const auto [entry, fresh] =
        known_.try_emplace({group, count}, static_cast<uint32_t>(args_.size()));
    if (fresh) args_.push_back(ArgsFor(decision_.group[group], count));
    return entry->second;
  }

  const std::vector<UpdateArgs>& args() const { return args_; }

 private:
  const Decision& decision_;
  std::vector<UpdateArgs> args_;
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> known_;
};

}  // namespace

bool Engine::AllArrived() const {
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    if (context_.board().rank(rank).arrival.load(std::memory_order_acquire) != attempt_)
      return false;
  }
  return true;
}

ExactSum Engine::Squares(Tag last) const {
  ExactSum sum;
  const PartitionPlan& plan = context_.memory().plan();
  for (uint32_t unit = 0; unit < squares_.size(); ++unit) {
    if (!plan.unit(unit).has_optimizer || plan.unit(unit).shard.size() == 0) continue;
    const MergeRecord& record = context_.board().merged(context_.me(), unit);
    const Presence present = PresenceBefore(record, last);
    const UnitSquares& known = squares_[unit];
    if (known.tag == record.tag.load(std::memory_order_acquire) && known.present == present) {
      sum.Merge(known.sum);
    } else {
      shard_.AddSquares(unit, present, sum);
    }
  }
  sum.Normalize();
  return sum;
}

bool Engine::AnnounceReady() {
  WorkerSlot& slot = context_.board().worker(context_.me());
  if (slot.ready.load() == attempt_ || !AllArrived()) return false;
  const Tag last = MakeTag(attempt_, context_.board().rank(0).input.micro_steps - 1);
  const PartitionPlan& plan = context_.memory().plan();
  const size_t units = context_.layout().units().size();
  for (uint32_t unit = 0; unit < units; ++unit) {
    if (!plan.unit(unit).has_optimizer) continue;
    if (context_.board().merged(context_.me(), unit).tag.load(std::memory_order_acquire) < last)
      return false;
  }
  if (device_ != nullptr && !HasSums()) return false;
  if (!IsMirrored()) return false;
  if (IsPowerSafe() && !SealCommitted()) return false;
  ExactSum sum;
  if (device_ == nullptr) {
    sum = Squares(last);
  } else if (absl::StatusOr<ExactSum> on_device = SquaresOnDevice(last); on_device.ok()) {
    sum = *on_device;
  } else {
    Abort(std::string(on_device.status().message()));
    return false;
  }
  static_assert(sizeof(sum) == sizeof(slot.norm));
  std::memcpy(slot.norm, &sum, sizeof(sum));
  ZS_FAULT_POINT("worker.step.before_ready");
  slot.ready.store(attempt_, std::memory_order_release);
  ZS_FAULT_POINT("worker.step.after_ready");
  context_.RingAll();
  return true;
}

bool Engine::Decide() {
  const Board& board = context_.board();
  Decision& decision = board.header().decision;
  if (decision.attempt.load() == attempt_) return false;
  ExactSum total;
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    if (board.worker(worker).ready.load(std::memory_order_acquire) != attempt_) return false;
    ExactSum part;
    std::memcpy(&part, board.worker(worker).norm, sizeof(part));
    total.Merge(part);
  }
  std::vector<const StepInput*> inputs;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    inputs.push_back(&board.rank(rank).input);
  }
  const absl::StatusOr<StepVerdict> verdict =
      DecideStep(context_.memory().config(), inputs, total, board.numbers());
  if (!verdict.ok()) {
    context_.Poison(verdict.status());
    return false;
  }
  decision.skip = verdict->skip ? 1 : 0;
  decision.micro_steps = inputs[0]->micro_steps;
  decision.grad_scale = verdict->grad_scale;
  decision.groups = inputs[0]->groups;
  decision.next = verdict->next;
  std::memcpy(decision.group, inputs[0]->group, sizeof(decision.group));
  ZS_FAULT_POINT("worker.step.before_decision");
  decision.attempt.store(attempt_, std::memory_order_release);
  ZS_FAULT_POINT("worker.step.after_decision");
  context_.RingAll();
  return true;
}

uint64_t Engine::CountWord(uint32_t unit, uint32_t parameter) const {
  const Board& board = context_.board();
  const uint64_t common = board.common_count(unit).load(std::memory_order_acquire);
  return common != 0 ? common : board.update_count(parameter).load(std::memory_order_acquire);
}

// A parameter's updates before the step in flight.
uint64_t Engine::CountBefore(uint32_t unit, uint32_t parameter) const {
  const uint64_t word = CountWord(unit, parameter);
  const uint64_t count = word & 0xffffffff;
  return word >> 32 == (attempt_ & 0xffffffff) && count > 0 ? count - 1 : count;
}

// Whether all parameters of the unit were updated equally often; false also when a killed process
// has counted some of them for the step in flight.
bool Engine::AllCountsEqual(uint32_t unit) const {
  const Board& board = context_.board();
  if (board.common_count(unit).load(std::memory_order_acquire) != 0) return true;
  const std::vector<uint32_t>& parameters = context_.layout().units()[unit].parameters;
  const uint64_t first = board.update_count(parameters[0]).load(std::memory_order_acquire);
  return std::all_of(parameters.begin(), parameters.end(), [&](uint32_t parameter) {
    return board.update_count(parameter).load(std::memory_order_acquire) == first;
  });
}

// Counts the step in flight for the unit's parameters in `present`; may be repeated.
void Engine::CountUpdates(uint32_t unit, const Presence& present) const {
  const Board& board = context_.board();
  const uint64_t attempt = (attempt_ & 0xffffffff) << 32;
  const Unit& described = context_.layout().units()[unit];
  const std::vector<uint32_t>& parameters = described.parameters;
  if (parameters.empty() || present == Presence{}) return;
  if (present == FullPresence(described) && AllCountsEqual(unit)) {
    const uint64_t word = attempt | (CountBefore(unit, parameters[0]) + 1);
    board.common_count(unit).store(word, std::memory_order_release);
    return;
  }
  // The common count holds until every parameter has its own.
  for (uint32_t position = 0; position < parameters.size(); ++position) {
    const uint32_t parameter = parameters[position];
    const uint64_t word = IsPresent(present, position)
                              ? attempt | (CountBefore(unit, parameter) + 1)
                              : CountWord(unit, parameter);
    board.update_count(parameter).store(word, std::memory_order_release);
  }
  ZS_FAULT_POINT("worker.commit.before_own_counts");
  board.common_count(unit).store(0, std::memory_order_release);
}

void Engine::FindGroupsOfUnits() {
  const std::span<const ParameterSpec> parameters = context_.layout().parameters();
  for (const Unit& unit : context_.layout().units()) {
    uint32_t group = unit.parameters.empty() ? kMixedGroups : parameters[unit.parameters[0]].group;
    for (const uint32_t parameter : unit.parameters) {
      if (parameters[parameter].group != group) group = kMixedGroups;
    }
    group_of_unit_.push_back(group);
  }
}

bool Engine::Apply() {
  const Board& board = context_.board();
  const Decision& decision = board.header().decision;
  std::atomic<uint64_t>& applied = board.worker(context_.me()).applied;
  if (decision.attempt.load(std::memory_order_acquire) != attempt_ || applied.load() == attempt_) {
    return false;
  }
  if (!MayApply()) return false;
  if (const absl::Status status = DoStep(); !status.ok()) {
    FailStep(status);
    return false;
  }
  ZS_FAULT_POINT("worker.apply.before_applied");
  applied.store(attempt_, std::memory_order_release);
  ZS_FAULT_POINT("worker.apply.after_applied");
  context_.RingAll();
  return true;
}

absl::Status Engine::DoStep() {
  if (context_.board().header().decision.skip == 0) ZS_RETURN_IF_ERROR(Update());
  return Seal();
}

absl::Status Engine::Update() {
  const Board& board = context_.board();
  const Decision& decision = board.header().decision;
  if (group_of_unit_.empty()) FindGroupsOfUnits();
  const std::span<const Unit> units = context_.layout().units();
  std::vector<uint32_t> args_of_unit(units.size(), kByParameter);
  std::vector<uint32_t> args_of;
  StepArgs args(decision);
  for (uint32_t u = 0; u < units.size(); ++u) {
    if (!context_.memory().plan().unit(u).has_optimizer) continue;
    const Presence present = PresenceBefore(board.merged(context_.me(), u), MakeTag(attempt_, 0));
    const std::vector<uint32_t>& parameters = units[u].parameters;
    if (group_of_unit_[u] != kMixedGroups && present == FullPresence(units[u]) &&
        AllCountsEqual(u)) {
      args_of_unit[u] = args.IndexOf(group_of_unit_[u], CountBefore(u, parameters[0]) + 1);
      continue;
    }
    args_of.resize(context_.layout().parameters().size(), kNotUpdated);
    for (uint32_t position = 0; position < parameters.size(); ++position) {
      if (!IsPresent(present, position)) continue;
      const uint32_t group = context_.layout().parameters()[parameters[position]].group;
      args_of[parameters[position]] = args.IndexOf(group, CountBefore(u, parameters[position]) + 1);
    }
  }
  ZS_FAULT_POINT("worker.apply.before");
  return shard_.Apply({.attempt = attempt_,
                       .step = board.numbers().step,
                       .grad_scale = decision.grad_scale,
                       .args_of_unit = args_of_unit,
                       .args_of = args_of,
                       .args = args.args()});
}

bool Engine::Commit() {
  const Board& board = context_.board();
  BoardHeader& header = board.header();
  if (header.decision.attempt.load() != attempt_) return false;
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    if (board.worker(worker).applied.load(std::memory_order_acquire) != attempt_) return false;
  }
  if (header.decision.skip == 0) {
    const std::span<const Unit> units = context_.layout().units();
    for (uint32_t u = 0; u < units.size(); ++u) {
      if (!context_.memory().plan().unit(u).has_optimizer) continue;
      const Presence present = PresenceBefore(board.merged(context_.me(), u), MakeTag(attempt_, 0));
      CountUpdates(u, present);
    }
  }
  ZS_FAULT_POINT("worker.commit.before_numbers");
  const uint64_t spare = (header.commit.load() & 1) ^ 1;
  header.numbers[spare] = header.decision.next;
  header.epoch.fetch_add(1);
  ZS_FAULT_POINT("worker.commit.before");
  header.commit.store(attempt_ << 1 | spare, std::memory_order_release);
  ZS_FAULT_POINT("worker.commit.after");
  header.attempt.store(attempt_ + 1, std::memory_order_release);
  context_.RingAll();
  return true;
}

}  // namespace zeroshard
