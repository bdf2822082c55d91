// The job's own state, as checkpoints hold it.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/engine.h"
#include "worker/merge_records.h"

namespace zeroshard {

namespace {

void AddNumbers(const JobNumbers& numbers, records::v1::JobState& state) {
  state.set_step(numbers.step);
  state.set_updates(numbers.updates);
  state.set_skipped(numbers.skipped);
  state.mutable_loss_scale()->set_scale(numbers.loss_scale);
  state.mutable_loss_scale()->set_hysteresis_left(numbers.scaler_hysteresis);
  state.mutable_loss_scale()->set_iteration(numbers.scaler_iteration);
  state.mutable_loss_scale()->set_last_overflow(numbers.scaler_last_overflow);
}

void AddUserStates(const JobMemory& memory, uint64_t attempt, records::v1::JobState& state) {
  state.set_world_size(memory.ranks());
  for (uint32_t rank = 0; rank < memory.ranks(); ++rank) {
    const auto bytes = memory.user_states().Read(rank, attempt);
    state.add_user_states(bytes.data(), bytes.size());
  }
}

}  // namespace

records::v1::JobState Engine::JobState() const {
  const Board& board = context_.board();
  records::v1::JobState state;
  AddNumbers(board.numbers(), state);
  for (uint32_t parameter = 0; parameter < context_.layout().parameters().size(); ++parameter) {
    const uint32_t unit = context_.layout().place(parameter).unit;
    state.add_parameter_updates(CountWord(unit, parameter) & 0xffffffff);
  }
  AddUserStates(context_.memory(), board.committed_attempt(), state);
  return state;
}

// The same as of the decided step in flight, before it is committed.
records::v1::JobState Engine::StateAfterStep() const {
  const Board& board = context_.board();
  const Decision& decision = board.header().decision;
  records::v1::JobState state;
  AddNumbers(decision.next, state);
  for (uint32_t parameter = 0; parameter < context_.layout().parameters().size(); ++parameter) {
    state.add_parameter_updates(CountBefore(context_.layout().place(parameter).unit, parameter));
  }
  for (uint32_t u = 0; u < context_.layout().units().size() && decision.skip == 0; ++u) {
    if (!context_.memory().plan().unit(u).has_optimizer) continue;
    const Presence present = PresenceBefore(board.merged(context_.me(), u), MakeTag(attempt_, 0));
    const std::vector<uint32_t>& parameters = context_.layout().units()[u].parameters;
    for (uint32_t position = 0; position < parameters.size(); ++position) {
      if (!IsPresent(present, position)) continue;
      const auto parameter = static_cast<int>(parameters[position]);
      state.set_parameter_updates(parameter, state.parameter_updates(parameter) + 1);
    }
  }
  AddUserStates(context_.memory(), attempt_, state);
  return state;
}

// A restore commits the attempt in flight with the checkpoint's numbers; gradients sent for it are
// dropped.
absl::Status Engine::FinishRestore(const records::v1::JobState& state, bool parameters_only,
                                   uint64_t committed_as) {
  const Board& board = context_.board();
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) SetInitialized(unit);
  shard_.Abandon();
  went_back_ = false;
  BoardHeader& header = board.header();
  if (!context_.is_island_leader()) return absl::OkStatus();
  header.epoch.fetch_add(1);
  // It may be committed already, and a predecessor have died behind that.
  if (committed_as > header.attempt.load()) header.attempt.store(committed_as);
  const uint64_t attempt = committed_as != 0 ? committed_as : board.attempt();
  JobNumbers numbers = board.numbers();
  if (!parameters_only) {
    const size_t parameters = context_.layout().parameters().size();
    if (static_cast<size_t>(state.parameter_updates_size()) != parameters) {
      return absl::DataLossError(absl::StrCat("the checkpoint counts updates of ",
                                              state.parameter_updates_size(), " parameters of ",
                                              parameters));
    }
    for (uint32_t parameter = 0; parameter < parameters; ++parameter) {
      board.update_count(parameter).store(state.parameter_updates(static_cast<int>(parameter)) &
                                          0xffffffff);
    }
    for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
      board.common_count(unit).store(0);
    }
    numbers.step = state.step();
    numbers.updates = state.updates();
    numbers.skipped = state.skipped();
    numbers.loss_scale = state.loss_scale().scale();
    numbers.scaler_hysteresis = state.loss_scale().hysteresis_left();
    numbers.scaler_iteration = state.loss_scale().iteration();
    numbers.scaler_last_overflow = state.loss_scale().last_overflow();
  }
  const bool same_world = state.user_states_size() == static_cast<int>(context_.memory().ranks());
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    std::span<const std::byte> bytes =
        context_.memory().user_states().Read(rank, board.committed_attempt());
    if (!parameters_only) bytes = {};
    if (!parameters_only && same_world) {
      const std::string& saved = state.user_states(static_cast<int>(rank));
      bytes = {reinterpret_cast<const std::byte*>(saved.data()), saved.size()};
    }
    ZS_RETURN_IF_ERROR(
        context_.memory().user_states().Write(rank, attempt, board.committed_attempt(), bytes));
  }
  const uint64_t spare = (header.commit.load() & 1) ^ 1;
  header.numbers[spare] = numbers;
  header.commit.store(attempt << 1 | spare, std::memory_order_release);
  header.attempt.store(attempt + 1, std::memory_order_release);
  context_.RingAll();
  return absl::OkStatus();
}

absl::Status Engine::MakeReadable(uint32_t unit, absl::Duration timeout) {
  const Board& board = context_.board();
  const absl::Duration deadline = context_.now() + timeout;
  const bool resident = context_.memory().plan().unit(unit).resident;
  while (true) {
    bool readable = true;
    const uint64_t epoch = board.header().epoch.load();
    if (!resident && board.wanted(unit).load() != epoch) {
      board.wanted(unit).store(epoch);
      context_.MarkDirty(unit);
      context_.RingAll();
    }
    ZS_RETURN_IF_ERROR(keeper_.Fill({&unit, 1}, shard_).status());
    if (bridge_ != nullptr) {
      pump_();
      bridge_->Advance();
    }
    for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
      readable &= board.initialized(worker, unit).load(std::memory_order_acquire) != 0;
      if (!resident) readable &= board.fill(worker, unit).load() == epoch;
    }
    if (readable) return absl::OkStatus();
    if (context_.now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("no values of ", context_.UnitName(unit),
                                                      " within ", absl::FormatDuration(timeout)));
    }
    context_.SleepFor(absl::Microseconds(200));
  }
}

}  // namespace zeroshard
