// The part of Bridge that writes what other workers sent into this island's board.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/status.h"
#include "worker/bridge.h"
#include "worker/bridge_frames.h"

namespace zeroshard {

void Bridge::OnFrame(uint32_t peer, Frame frame) {
  const size_t units = context_.layout().units().size();
  const uint32_t ranks = context_.memory().ranks();
  const Board& board = context_.board();
  ZS_FAULT_POINT("worker.bridge.frame");
  switch (static_cast<BridgeFrame>(frame.kind)) {
    case BridgeFrame::kOrder:
    case BridgeFrame::kArrival:
      if (frame.index >= ranks || is_mine(frame.index)) break;
      if (IsAhead(frame.tag)) {
        early_.emplace_back(peer, std::move(frame));
      } else if (frame.tag == board.attempt()) {
        static_cast<BridgeFrame>(frame.kind) == BridgeFrame::kOrder ? OnOrder(frame)
                                                                    : OnArrival(frame);
      }
      return;
    case BridgeFrame::kPut:
      if (frame.index < ranks && frame.value < units) OnPut(peer, frame);
      return;
    case BridgeFrame::kPutDone:
      if (frame.index < ranks) board.put_done(peer, frame.index).store(frame.tag);
      return;
    case BridgeFrame::kPartial:
      if (frame.index < units) OnPartial(peer, std::move(frame));
      return;
    case BridgeFrame::kMerged:
      if (frame.index < units)
        board.merged(peer, frame.index).tag.store(frame.tag, std::memory_order_release);
      return;
    case BridgeFrame::kInitialized:
      if (frame.index < units) board.initialized(peer, frame.index).store(1);
      return;
    case BridgeFrame::kPull:
      if (frame.index < units) pulls_.emplace_back(peer, std::move(frame));
      return;
    case BridgeFrame::kShard:
      if (frame.index < units) OnShard(peer, frame);
      return;
    case BridgeFrame::kReady:
    case BridgeFrame::kApplied:
    case BridgeFrame::kDecision:
      if (IsAhead(frame.tag)) {
        early_.emplace_back(peer, std::move(frame));
      } else if (static_cast<BridgeFrame>(frame.kind) == BridgeFrame::kDecision) {
        OnDecision(frame);
      } else {
        OnWorkerMark(peer, frame);
      }
      return;
    case BridgeFrame::kContribution:
    case BridgeFrame::kMicroEnd:
      if (IsAhead(AttemptOf(frame.tag))) {
        early_.emplace_back(peer, std::move(frame));
      } else if (AttemptOf(frame.tag) == board.attempt()) {
        static_cast<BridgeFrame>(frame.kind) == BridgeFrame::kMicroEnd ? OnMicroEnd(frame)
                                                                       : OnContribution(frame);
      }
      return;
    case BridgeFrame::kPoison:
      OnPoison(peer, frame);
      return;
    case BridgeFrame::kDrop:
      OnDrop(frame);
      return;
  }
  LogWarn(absl::StrCat("frame dropped kind=", frame.kind, " index=", frame.index, " peer=", peer));
}

void Bridge::OnOrder(const Frame& frame) {
  RankSlot& slot = context_.board().rank(frame.index);
  ByteReader reader(frame.payload);
  uint64_t index = frame.value;
  for (uint32_t unit = 0; reader.left() > 0 && reader.Value(unit); ++index) {
    slot.order[index % kOrderRing].store(OrderEntry(frame.tag, index, unit));
    context_.CompareOrder(frame.index, frame.tag, index, unit);
  }
  slot.order_end.store(frame.tag << 32 | (index & 0xffffffff), std::memory_order_release);
}

void Bridge::OnArrival(const Frame& frame) {
  RankSlot& slot = context_.board().rank(frame.index);
  ByteReader reader(frame.payload);
  if (!reader.Value(slot.input)) return;
  const absl::Status status = context_.memory().user_states().Write(
      frame.index, frame.tag, context_.board().committed_attempt(), reader.Bytes(reader.left()));
  if (!status.ok())
    LogWarn(absl::StrCat("user_state not mirrored error=\"", status.message(), "\""));
  slot.arrival.store(frame.tag, std::memory_order_release);
  context_.MarkAllDirty(context_.me());
}

void Bridge::OnPut(uint32_t peer, Frame frame) {
  if ((context_.memory().nvme_plan() != nullptr || has_data_plane()) &&
      context_.board().header().decision.attempt.load() == context_.board().attempt()) {
    // What a decided step reads in another tier stays there until it is committed.
    early_.emplace_back(peer, std::move(frame));
    return;
  }
  const auto unit = static_cast<uint32_t>(frame.value);
  const Unit& layout_unit = context_.layout().units()[unit];
  ByteReader reader(frame.payload);
  uint64_t offset = 0;
  uint64_t elements = 0;
  if (!reader.Value(offset) || !reader.Value(elements) || offset > layout_unit.elements() ||
      elements > layout_unit.elements() - offset ||
      reader.left() != elements * SizeOf(layout_unit.dtype)) {
    LogWarn(absl::StrCat("put dropped unit=", unit, " peer=", peer));
    return;
  }
  const std::span<const std::byte> values = reader.Bytes(reader.left());
  std::atomic<uint64_t>& done = context_.board().put_done(context_.me(), frame.index);
  if (done.load() < frame.tag) {
    const absl::StatusOr<bool> whole = shard_.Put(unit, offset, elements, values.data());
    if (!whole.ok()) {
      context_.Poison(
          Annotate(whole.status(), absl::StrCat("values of ", context_.UnitName(unit))));
      return;
    }
    if (*whole) context_.board().initialized(context_.me(), unit).store(1);
    ForgetShards(unit);
    context_.MarkDirty(unit);
    done.store(frame.tag, std::memory_order_release);
  }
  Post(peer, {static_cast<uint32_t>(BridgeFrame::kPutDone), frame.index, frame.tag, 0, {}});
}

void Bridge::ForgetShards(uint32_t unit) {
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    context_.board().fill(worker, unit).store(0);
    sent_[worker].pulled[unit] = 0;
    sent_[worker].pull[unit] = 0;
  }
}

bool Bridge::AnswerPulls() {
  return std::erase_if(pulls_, [&](const auto& pull) {
           const auto& [peer, frame] = pull;
           ByteReader reader(frame.payload);
           for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
             uint64_t seen = 0;
             if (!reader.Value(seen)) return true;
             if (context_.board().put_done(context_.me(), rank).load() < seen) return false;
           }
           // On the NVMe tier the new parameters are current only once the step is committed.
           // Epochs of two islands are not compared: a commit that was interrupted raises one
           // twice.
           uint64_t committed = 0;
           if (!reader.Value(committed)) return true;
           if (context_.board().committed_attempt() < committed) return false;
           SendShard(peer, frame.index, frame.tag, frame.value);
           return true;
         }) > 0;
}

void Bridge::OnPartial(uint32_t peer, Frame frame) {
  const Board& board = context_.board();
  if (board.merged(context_.me(), frame.index).tag.load() >= frame.tag ||
      AttemptOf(frame.tag) < board.attempt()) {
    return;
  }
  const UnitPlan& plan = context_.memory().plan().unit(frame.index);
  ByteReader reader(frame.payload);
  Partials partials;
  for (size_t i = 0; i < nodes_[peer].size(); ++i) {
    PartialHeader header;
    bool good = reader.Value(header) && IsValidDType(header.dtype);
    if (good) {
      const auto dtype = static_cast<DType>(header.dtype);
      const uint64_t offset = frame.payload.size() - reader.left();
      const uint64_t bytes = header.any != 0 ? plan.slice.elements() * SizeOf(dtype) : 0;
      good = reader.Bytes(bytes).size() == bytes;
      partials.sums.push_back({header.any != 0, dtype, header.weight, header.present, offset});
    }
    if (!good) {
      LogWarn(absl::StrCat("partial sum dropped unit=", frame.index, " peer=", peer));
      return;
    }
  }
  // Added from where they came.
  partials.payload = std::move(frame.payload);
  Received& received =
      partials_.try_emplace({frame.index, frame.tag}, Received{context_.now(), {}}).first->second;
  received.by_peer[peer] = std::move(partials);
  board.dirty(context_.me())[frame.index / 64].fetch_or(uint64_t{1} << (frame.index % 64));
}

void Bridge::OnShard(uint32_t peer, const Frame& frame) {
  const Unit& unit = context_.layout().units()[frame.index];
  const GrainRange shard = context_.layout().slice(frame.index, peer);
  const uint64_t element_bytes = SizeOf(unit.dtype);
  if (frame.payload.size() != shard.elements() * element_bytes) {
    LogWarn(absl::StrCat("shard dropped unit=", frame.index, " peer=", peer));
    return;
  }
  const Board& board = context_.board();
  if (frame.value != 0) {
    // What was pulled may be given back and wanted again in the same epoch.
    if (frame.tag != sent_[peer].pull[frame.index]) return;
    uint64_t& pulled = sent_[peer].pulled[frame.index];
    if (pulled == frame.value) pulled = 0;
    // A pull; what it was asked for may have passed.
    if (board.wanted(frame.index).load() != frame.value || board.evicting(frame.index).load() != 0)
      return;
  }
  // A shard may be empty.
  std::copy(frame.payload.begin(), frame.payload.end(),
            context_.memory().unit_window(frame.index) + shard.first_element() * element_bytes);
  if (frame.value != 0) board.fill(peer, frame.index).store(frame.value);
}

void Bridge::OnDecision(const Frame& frame) {
  Decision& decision = context_.board().header().decision;
  auto* bytes = reinterpret_cast<std::byte*>(&decision.skip);
  const size_t size = static_cast<size_t>(reinterpret_cast<std::byte*>(&decision + 1) - bytes);
  if (frame.tag != context_.board().attempt() || decision.attempt.load() == frame.tag ||
      frame.payload.size() != size) {
    return;
  }
  std::memcpy(bytes, frame.payload.data(), size);
  ZS_FAULT_POINT("worker.bridge.before_decision");
  decision.attempt.store(frame.tag, std::memory_order_release);
}

// Of this generation; an earlier one is over, a later one not reached yet.
void Bridge::OnPoison(uint32_t peer, const Frame& frame) {
  const uint64_t generation = context_.board().header().generation.load();
  if (frame.tag > generation) early_.emplace_back(peer, frame);
  if (frame.tag != generation) return;
  context_.Poison(
      absl::Status(static_cast<absl::StatusCode>(frame.value),
                   {reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size()}));
}

void Bridge::OnDrop(const Frame& frame) {
  BoardHeader& header = context_.board().header();
  ByteReader reader(frame.payload);
  uint64_t generation = 0;
  if (!reader.Value(generation) || generation <= header.drop_generation.load()) return;
  header.drop_after.store(frame.value);
  header.drop_until.store(frame.tag);
  ZS_FAULT_POINT("worker.bridge.before_drop");
  header.drop_generation.store(generation, std::memory_order_release);
}

void Bridge::OnWorkerMark(uint32_t peer, const Frame& frame) {
  WorkerSlot& slot = context_.board().worker(peer);
  if (static_cast<BridgeFrame>(frame.kind) == BridgeFrame::kApplied) {
    if (slot.applied.load() < frame.tag) slot.applied.store(frame.tag, std::memory_order_release);
    return;
  }
  if (frame.payload.size() != sizeof(slot.norm) || slot.ready.load() >= frame.tag) return;
  std::memcpy(slot.norm, frame.payload.data(), sizeof(slot.norm));
  slot.ready.store(frame.tag, std::memory_order_release);
}

}  // namespace zeroshard
