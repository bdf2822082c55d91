#include "worker/rank_port.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/futex.h"
#include "base/status.h"
#include "worker/step_input.h"

namespace zeroshard {

RankPort::RankPort(EngineContext& context, uint32_t rank, DeviceShard* device)
    : context_(context), rank_(rank), page_(context.memory().rank_page(rank)), device_(device) {}

void RankPort::Hello(const trainer::v1::Hello& hello) {
  queue_.clear();
  puts_.clear();
  posted_.clear();
  hello_ = hello;
  slot().activity.fetch_add(1, std::memory_order_relaxed);
  // A reconnecting process whose takeover a dying worker did not finish is treated as new.
  const bool known = slot().attached.load(std::memory_order_acquire) == hello.generation();
  takeover_ = hello.reconnect() && known ? Takeover::kNone : Takeover::kMicroEnd;
  if (takeover_ == Takeover::kNone) return;
  slot().attached.store(0, std::memory_order_release);
  // A process that had arrived left nothing to replay: the step in flight commits without it.
  if (HasArrived()) {
    takeover_ = Takeover::kFinish;
  } else {
    TakeBackMicroEnd();
  }
}

std::optional<uint64_t> RankPort::Attempt() const {
  const BoardHeader& header = context_.board().header();
  const uint64_t attempt = header.attempt.load();  // before drop_until, which is written first
  if (header.drop_until.load() != drop_) return std::nullopt;
  return attempt;
}

bool RankPort::HasArrived() const {
  return slot().arrival.load(std::memory_order_acquire) == context_.board().attempt();
}

// Workers read micro_end before the contributions: so it goes back first, and the contributions
// only when no worker can still take their absence for the rank's last word.
void RankPort::TakeBackMicroEnd() {
  const uint64_t attempt = context_.board().attempt();
  Tag earliest = kAbsent;
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    const Tag tag = context_.board().contribution(unit, rank_).tag.load(std::memory_order_acquire);
    if (AttemptOf(tag) == attempt && !context_.IsConsumed(rank_, unit, tag)) {
      earliest = std::min(earliest, tag);
    }
  }
  if (slot().micro_end.load() >= earliest) slot().micro_end.store(earliest - 1);
  ZS_FAULT_POINT("worker.hello.micro_end_back");
  RaiseFence();
}

void RankPort::TakeBackContributions() {
  const uint64_t attempt = context_.board().attempt();
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    Contribution& contribution = context_.board().contribution(unit, rank_);
    const Tag tag = contribution.tag.load(std::memory_order_acquire);
    if (AttemptOf(tag) != attempt || context_.IsConsumed(rank_, unit, tag)) continue;
    // Not to the micro-step before: the rank may have had no gradient of this unit in it.
    contribution.tag.store(0, std::memory_order_release);
    ZS_FAULT_POINT("worker.hello.contribution_back");
  }
  RaiseFence();
}

void RankPort::FinishTakeover() {
  RankSlot& rank = slot();
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    context_.board().pins(rank_, unit).store(0, std::memory_order_release);
  }
  for (std::atomic<uint64_t>& entry : page_->slots) entry.store(0, std::memory_order_relaxed);
  rank.posted.store(0, std::memory_order_release);
  rank.order_start.store(0, std::memory_order_release);
  rank.order_end.store(context_.board().attempt() << 32, std::memory_order_release);
  rank.arrival_request = 0;
  if (device_ != nullptr) device_->StartCounters();
  page_->poisoned.store(0, std::memory_order_release);
  page_->generation.store(hello_->generation(), std::memory_order_release);
  ZS_FAULT_POINT("worker.hello.before_attached");
  rank.attached.store(hello_->generation(), std::memory_order_release);
}

void RankPort::Leave() {
  slot().attached.store(0);
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    std::atomic<uint64_t>& pin = context_.board().pins(rank_, unit);
    const uint64_t word = pin.load(std::memory_order_acquire);
    if ((word & 0xffff) == 0) continue;
    pin.store(word & ~uint64_t{0xffff});
    context_.MarkDirty(unit);
  }
  context_.RingAll();
}

void RankPort::RaiseFence() {
  fence_ = context_.board().header().fence.fetch_add(1) + 1;
  context_.RingAll();
}

bool RankPort::FenceSeen() const {
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    // Other islands work on copies of this rank's gradients.
    if (!context_.memory().in_island(worker)) continue;
    if (context_.board().worker(worker).fence.load(std::memory_order_acquire) < fence_)
      return false;
  }
  return true;
}

bool RankPort::PollHello() {
  if (!hello_.has_value() || !context_.IsDropDone()) return false;
  switch (takeover_) {
    case Takeover::kMicroEnd:
      if (!FenceSeen()) return false;
      takeover_ = Takeover::kContributions;
      TakeBackContributions();
      return true;
    case Takeover::kContributions:
      if (!FenceSeen()) return false;
      takeover_ = Takeover::kFinish;
      return true;
    case Takeover::kFinish:
      if (HasArrived()) return false;
      FinishTakeover();
      break;
    case Takeover::kNone:
      break;
  }
  ReplyHello();
  return true;
}

void RankPort::ReplyHello() {
  hello_.reset();
  drop_ = context_.board().header().drop_until.load();
  Refresh();
  const Board& board = context_.board();
  trainer::v1::HelloReply reply;
  const JobNumbers& numbers = board.numbers();
  reply.set_step(numbers.step);
  reply.set_attempt(board.attempt());
  reply.set_updates(numbers.updates);
  reply.set_loss_scale(numbers.loss_scale);
  const auto state = context_.memory().user_states().Read(rank_, board.committed_attempt());
  reply.set_user_state(state.data(), state.size());
  bool initialized = true;
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
      initialized &= board.initialized(worker, unit).load(std::memory_order_acquire) != 0;
    }
  }
  reply.set_initialized(initialized);
  ZS_FAULT_POINT("worker.hello.before_reply");
  context_.output().ToRank(rank_, reply);
}

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
