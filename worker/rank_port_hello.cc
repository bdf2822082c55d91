// The part of RankPort by which a process takes a rank's place, and leaves it.
#include <algorithm>

#include "base/fault_point.h"
#include "worker/rank_port.h"

namespace zeroshard {

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

}  // namespace zeroshard
