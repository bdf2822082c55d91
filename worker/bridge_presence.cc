// The part of Bridge that jobs with a data plane have: what their ranks have summed.
#include <utility>

#include "worker/bridge.h"
#include "worker/bridge_frames.h"

namespace zeroshard {

// It stays on the board until every worker has merged it.
bool Bridge::SendContribution(uint32_t peer, uint32_t unit) {
  const uint32_t rank = ranks_of_[context_.me()].front();
  const Contribution& contribution = context_.board().contribution(unit, rank);
  const Tag tag = contribution.tag.load(std::memory_order_acquire);
  Tag& sent = sent_[peer].contribution[unit];
  if (AttemptOf(tag) != attempt_ || sent == tag) return false;
  sent = tag;
  Frame frame = {static_cast<uint32_t>(BridgeFrame::kContribution), unit, tag, rank, {}};
  ByteWriter writer;
  writer.Value(contribution.present);
  frame.payload = writer.Take();
  Post(peer, std::move(frame));
  return true;
}

bool Bridge::SendMicroEnd(uint32_t peer, uint32_t rank) {
  const Tag tag = context_.board().rank(rank).micro_end.load(std::memory_order_acquire);
  Tag& sent = sent_[peer].micro_end[rank];
  if (AttemptOf(tag) != attempt_ || sent == tag) return false;
  sent = tag;
  Post(peer, {static_cast<uint32_t>(BridgeFrame::kMicroEnd), rank, tag, 0, {}});
  return true;
}

void Bridge::OnContribution(const Frame& frame) {
  const auto rank = static_cast<uint32_t>(frame.value);
  if (frame.index >= context_.layout().units().size() || rank >= context_.memory().ranks() ||
      is_mine(rank)) {
    return;
  }
  Contribution& contribution = context_.board().contribution(frame.index, rank);
  // Of an earlier one nobody sends a later one before this worker has merged it.
  if (contribution.tag.load() >= frame.tag) return;
  ByteReader reader(frame.payload);
  if (!reader.Value(contribution.present)) return;
  contribution.tag.store(frame.tag, std::memory_order_release);
  context_.board().dirty(context_.me())[frame.index / 64].fetch_or(uint64_t{1}
                                                                   << (frame.index % 64));
}

void Bridge::OnMicroEnd(const Frame& frame) {
  if (frame.index >= context_.memory().ranks() || is_mine(frame.index)) return;
  std::atomic<Tag>& micro_end = context_.board().rank(frame.index).micro_end;
  if (micro_end.load() >= frame.tag) return;
  micro_end.store(frame.tag, std::memory_order_release);
  context_.MarkAllDirty(context_.me());
}

}  // namespace zeroshard
