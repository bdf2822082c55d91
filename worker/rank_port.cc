#include "worker/rank_port.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/futex.h"
#include "base/status.h"
#include "worker/step_input.h"

namespace zeroshard {

RankPort::RankPort(EngineContext& context, uint32_t rank, DeviceShard* device)
    : context_(context), rank_(rank), page_(context.memory().rank_page(rank)), device_(device) {}

void RankPort::Refresh() {
  const uint64_t epoch = context_.board().header().epoch.load(std::memory_order_acquire);
  page_->epoch.store(epoch, std::memory_order_release);
}

void RankPort::Submit(const Request& request) {
  slot().activity.fetch_add(1, std::memory_order_relaxed);
  if (absl::Status dead = context_.poison(); !dead.ok()) {
    FailRequest(request.id(), dead);
    return;
  }
  absl::Status status;
  switch (request.kind_case()) {
    case Request::kGather:
      status = Gather(request);
      break;
    case Request::kRelease:
      status = Release(request);
      break;
    case Request::kPut:
      status = Put(request);
      break;
    case Request::kScatter:
    case Request::kMicroEnd:
    case Request::kStep:
      status = CheckQueued(request);
      if (status.ok()) queue_.push_back(request);
      break;
    default:
      status = absl::InvalidArgumentError("a request of unknown kind");
  }
  if (!status.ok()) FailRequest(request.id(), status);
}

absl::Status RankPort::CheckUnits(const google::protobuf::RepeatedField<uint32_t>& units) const {
  const size_t known = context_.layout().units().size();
  for (uint32_t unit : units) {
    if (unit >= known) {
      return absl::InvalidArgumentError(absl::StrCat("unit ", unit, " of ", known));
    }
  }
  return absl::OkStatus();
}

absl::Status RankPort::CheckWindow(uint64_t offset, uint64_t bytes) const {
  const uint64_t size = context_.memory().gradient_window(rank_).size();
  if (offset % 64 != 0 || bytes > size || offset > size - bytes) {
    return absl::InvalidArgumentError(absl::StrCat("bytes [", offset, ", ", offset, " + ", bytes,
                                                   ") of a gradient window of ", size,
                                                   " bytes; offsets are multiples of 64"));
  }
  return absl::OkStatus();
}

absl::Status RankPort::CheckQueued(const Request& request) const {
  const model::v1::EngineConfig& config = context_.memory().config();
  if (config.forward_only()) {
    return absl::FailedPreconditionError(
        "a forward-only job takes no gradients and makes no steps");
  }
  if (request.has_micro_end()) {
    if (request.micro_end().micro_step() < kMaxMicroSteps) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("micro-step ", request.micro_end().micro_step()));
  }
  if (request.has_step()) {
    const trainer::v1::Step& step = request.step();
    if (step.micro_steps() == 0 || step.micro_steps() > kMaxMicroSteps) {
      return absl::InvalidArgumentError(absl::StrCat(step.micro_steps(), " micro-steps"));
    }
    if (step.groups_size() != context_.memory().start().manifest().groups_size() ||
        step.groups_size() > static_cast<int>(kMaxGroups)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the step brings ", step.groups_size(), " parameter groups, the job has ",
          context_.memory().start().manifest().groups_size(), "; at most ", kMaxGroups));
    }
    ZS_RETURN_IF_ERROR(CheckStepGroups(config, step));
    if (step.user_state().size() > config.user_state_bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("user_state of ", step.user_state().size(), " bytes; the job has room for ",
                       config.user_state_bytes(), " (zeroshard.user_state_bytes)"));
    }
    return absl::OkStatus();
  }
  const trainer::v1::Scatter& scatter = request.scatter();
  if (scatter.unit() >= context_.layout().units().size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unit ", scatter.unit(), " of ", context_.layout().units().size()));
  }
  const Unit& unit = context_.layout().units()[scatter.unit()];
  if (!unit.trainable) {
    return absl::InvalidArgumentError(
        absl::StrCat("a gradient for ", context_.UnitName(scatter.unit()), ", which is frozen"));
  }
  if (scatter.micro_step() >= kMaxMicroSteps) {
    return absl::InvalidArgumentError(absl::StrCat("micro-step ", scatter.micro_step()));
  }
  if (scatter.present().size() > sizeof(Presence)) {
    return absl::InvalidArgumentError(
        absl::StrCat("presence of ", scatter.present().size(), " bytes"));
  }
  if (!std::isfinite(scatter.weight()) || scatter.weight() < 0.0f) {
    return absl::InvalidArgumentError(absl::StrCat("gradient weight ", scatter.weight()));
  }
  if (device_ != nullptr) return absl::OkStatus();
  return CheckWindow(scatter.window_offset(), unit.bytes());
}

bool RankPort::Poll() {
  bool progress = PollHello();
  if (hello_.has_value()) return progress;
  Refresh();
  while (PostQueued()) progress = true;
  if (ring_) context_.RingAll();
  ring_ = false;
  while (PostPut()) progress = true;
  auto complete = [&](const Posted& posted) {
    if (!IsComplete(posted)) return false;
    Record(posted);
    Complete(posted.id, RankPage::kOk);
    return true;
  };
  const size_t before = posted_.size();
  std::erase_if(posted_, complete);
  progress |= posted_.size() != before;
  if (wake_) {
    wake_ = false;
    page_->wake.fetch_add(1, std::memory_order_release);
    FutexWakeAll(page_->wake);
  }
  return progress;
}

bool RankPort::IsComplete(const Posted& posted) {
  switch (posted.kind) {
    case Posted::Kind::kGather:
      if (posted.target != nullptr && !posted.copied) return false;
      return std::all_of(posted.units.begin(), posted.units.end(), [&](uint32_t unit) {
        return IsReadable(unit, IsWindowed(unit, posted.alone));
      });
    case Posted::Kind::kScatter:
      return context_.IsConsumed(rank_, posted.units[0], posted.mark);
    case Posted::Kind::kPut:
      for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
        if (context_.board().put_done(worker, rank_).load(std::memory_order_acquire) <
            posted.mark) {
          return false;
        }
      }
      return true;
    case Posted::Kind::kStep:
      if (context_.board().attempt() <= posted.mark) return false;
      CompleteStep(posted);
      return true;
  }
  return false;
}

bool RankPort::IsReadable(uint32_t unit, bool windowed) {
  const Board& board = context_.board();
  const uint32_t workers = context_.memory().workers();
  for (uint32_t worker = 0; worker < workers; ++worker) {
    if (board.initialized(worker, unit).load(std::memory_order_acquire) == 0) return false;
  }
  if (context_.memory().plan().unit(unit).resident || !windowed) return true;
  if (board.evicting(unit).load() != 0) return false;
  const uint64_t epoch = board.header().epoch.load(std::memory_order_acquire);
  bool filled = true;
  for (uint32_t worker = 0; worker < workers; ++worker) {
    filled &= board.fill(worker, unit).load() == epoch;
  }
  if (!filled && board.wanted(unit).load() != epoch) {
    board.wanted(unit).store(epoch);
    context_.MarkDirty(unit);
    context_.RingAll();
  }
  return filled;
}

std::vector<RankPort::WantedShard> RankPort::WantedShards() {
  std::vector<WantedShard> wanted;
  for (const Posted& posted : posted_) {
    if (posted.target == nullptr || posted.copied) continue;
    if (!IsReadable(posted.units[0], /*windowed=*/false)) continue;
    wanted.push_back({posted.id, {posted.units[0], posted.target}});
  }
  return wanted;
}

void RankPort::HasCopied(std::span<const WantedShard> shards) {
  size_t next = 0;
  for (Posted& posted : posted_) {
    if (next == shards.size() || posted.id != shards[next].id) continue;
    posted.copied = true;
    ++next;
  }
}

void RankPort::CompleteStep(const Posted& posted) {
  const JobNumbers& numbers = context_.board().numbers();
  // A predecessor may have died while it was odd.
  const uint64_t odd = page_->result_version.load(std::memory_order_relaxed) | 1;
  page_->result_version.store(odd, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  ZS_FAULT_POINT("worker.step.before_result");
  page_->result = {.step = numbers.step,
                   .attempt = context_.board().attempt(),
                   .updates = numbers.updates,
                   .loss_scale = numbers.loss_scale,
                   .grad_norm = numbers.grad_norm,
                   .norm_valid = numbers.norm_valid,
                   .skipped = numbers.last_skipped};
  page_->result_version.store(odd + 1, std::memory_order_release);
  Refresh();
  if (context_.memory().config().stage() < 3) {
    context_.counters().step_gather_elements += context_.layout().trainable_elements();
  }
  static_cast<void>(posted);
}

void RankPort::Record(const Posted& posted) {
  EngineCounters& counters = context_.counters();
  const absl::Duration latency = context_.now() - posted.since;
  if (posted.kind == Posted::Kind::kGather) counters.gather.Add(latency);
  if (posted.kind == Posted::Kind::kScatter) counters.scatter.Add(latency);
  if (posted.kind == Posted::Kind::kStep) counters.step.Add(latency);
}

void RankPort::Complete(uint64_t id, RankPage::Outcome outcome) {
  ZS_FAULT_POINT("worker.complete");
  page_->slots[id % kMaxPendingRequests].store(id * 4 + outcome, std::memory_order_release);
  wake_ = true;
}

void RankPort::FailRequest(uint64_t id, const absl::Status& status) {
  trainer::v1::Failure failure;
  failure.set_id(id);
  failure.set_code(static_cast<uint32_t>(status.raw_code()));
  failure.set_message(std::string(status.message()));
  context_.output().ToRank(rank_, failure);
  Complete(id, RankPage::kFailed);
}

void RankPort::Fail(const absl::Status& status) {
  for (const Posted& posted : posted_) FailRequest(posted.id, status);
  for (const Request& request : queue_) FailRequest(request.id(), status);
  for (const Request& request : puts_) FailRequest(request.id(), status);
  posted_.clear();
  queue_.clear();
  puts_.clear();
  trainer::v1::Failure failure;  // id 0: the whole job
  failure.set_code(static_cast<uint32_t>(status.raw_code()));
  failure.set_message(std::string(status.message()));
  context_.output().ToRank(rank_, failure);
  page_->poisoned.store(1, std::memory_order_release);
  page_->wake.fetch_add(1, std::memory_order_release);
  FutexWakeAll(page_->wake);
  wake_ = false;
}

std::optional<RankPort::Waiting> RankPort::OldestScatter() const {
  for (const Posted& posted : posted_) {
    if (posted.kind != Posted::Kind::kScatter) continue;
    return Waiting{posted.units[0], posted.mark, posted.since};
  }
  return std::nullopt;
}

}  // namespace zeroshard
