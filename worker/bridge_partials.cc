// The part of Bridge that sends and takes sums of gradients.
#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "worker/bridge.h"
#include "worker/bridge_frames.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {

bool Bridge::SendPartial(uint32_t peer, uint32_t unit) {
  // Nobody expects anything of an island without ranks.
  if (!context_.memory().plan().unit(unit).has_optimizer || ranks_of_[context_.me()].empty())
    return false;
  const Tag done = context_.board().merged(peer, unit).tag.load(std::memory_order_acquire);
  Tag& sent = sent_[peer].partial[unit];
  Tag tag = std::max(AttemptOf(done) == attempt_ ? done + 1 : MakeTag(attempt_, 0), sent + 1);
  if (context_.memory().has_local_accumulators()) {
    // One sum a step, over all micro-steps; which is the last one the own ranks' arrival tells.
    const RankSlot& first = context_.board().rank(ranks_of_[context_.me()][0]);
    if (AttemptOf(done) == attempt_ || AttemptOf(sent) == attempt_ ||
        first.arrival.load() != attempt_) {
      return false;
    }
    tag = MakeTag(attempt_, first.input.micro_steps - 1);
  }
  std::vector<std::optional<GradientInput>> inputs;
  for (uint32_t rank : ranks_of_[context_.me()]) {
    inputs.push_back(local_input_(rank, unit, tag));
    if (!inputs.back().has_value()) return false;
  }
  sent = tag;
  ZS_FAULT_POINT("worker.bridge.partial");
  Frame frame = {static_cast<uint32_t>(BridgeFrame::kPartial), unit, tag, 0, {}};
  // At stage 0 every peer needs the whole unit: summed once.
  const bool shared = context_.memory().config().stage() == 0 && context_.memory().workers() > 2;
  if (!shared) {
    frame.payload = EncodePartials(unit, peer, inputs);
  } else {
    if (encoded_.unit != unit || encoded_.tag != tag) {
      encoded_ = {unit, tag, EncodePartials(unit, peer, inputs)};
    }
    ByteWriter copy;
    copy.Bytes(encoded_.payload);
    frame.payload = copy.Take();
  }
  Post(peer, std::move(frame));
  return true;
}

// A node of one rank travels as it is; others as fp32 sums. Only the receiver's slice.
FrameBytes Bridge::EncodePartials(uint32_t unit, uint32_t peer,
                                  const std::vector<std::optional<GradientInput>>& inputs) const {
  const Layout& layout = context_.layout();
  const GrainRange slice = context_.memory().config().stage() == 0
                               ? GrainRange{0, layout.units()[unit].grains}
                               : layout.slice(unit, peer);
  const uint64_t first = slice.first_element();
  ByteWriter writer;
  writer.Reserve(nodes_[context_.me()].size() *
                 (sizeof(PartialHeader) + slice.elements() * sizeof(float)));
  size_t next = 0;
  for (size_t n = 0; n < nodes_[context_.me()].size(); ++n) {
    const TreeNode& node = nodes_[context_.me()][n];
    std::vector<GradientInput> leaves;
    for (uint32_t rank = node.begin; rank < node.end; ++rank) leaves.push_back(*inputs[next++]);
    PartialHeader header;
    for (const GradientInput& leaf : leaves) {
      if (leaf.data == nullptr) continue;
      for (uint32_t word = 0; word < kPresenceWords; ++word) {
        header.present[word] |= leaf.present[word];
      }
    }
    const bool single = leaves.size() == 1;
    const DType dtype = single ? leaves[0].dtype : DType::kFloat32;
    header.any = header.present != Presence{} ? 1 : 0;
    header.dtype = static_cast<uint8_t>(dtype);
    if (single) header.weight = leaves[0].weight;
    writer.Value(header);
    if (header.any == 0) continue;
    if (single) {
      writer.Bytes({leaves[0].data + first * SizeOf(dtype), slice.elements() * SizeOf(dtype)});
      continue;
    }
    std::byte* sums = writer.Extend(slice.elements() * sizeof(float));
    const AccumulateJob job{
        .unit = unit, .tag = 0, .plan = &node_plans_[n], .inputs = leaves, .before = {}};
    SumInputs(layout, job, slice, reinterpret_cast<float*>(sums) - first, pool_);
  }
  return writer.Take();
}

std::optional<std::vector<GradientInput>> Bridge::Inputs(uint32_t unit, Tag tag) {
  std::vector<GradientInput> inputs;
  for (uint32_t rank : ranks_of_[context_.me()]) {
    const std::optional<GradientInput> input = local_input_(rank, unit, tag);
    if (!input.has_value()) return std::nullopt;
    inputs.push_back(*input);
  }
  const auto received = partials_.find({unit, tag});
  for (uint32_t peer = 0; peer < context_.memory().workers(); ++peer) {
    if (peer == context_.me() || nodes_[peer].empty()) continue;
    if (received == partials_.end() || !received->second.by_peer.contains(peer)) {
      return std::nullopt;
    }
    const uint64_t first = context_.memory().plan().unit(unit).slice.first_element();
    const Partials& partials = received->second.by_peer.at(peer);
    for (const Partial& partial : partials.sums) {
      GradientInput input;
      if (partial.any) {
        input.data = partials.payload.data() + partial.offset - first * SizeOf(partial.dtype);
      }
      input.dtype = partial.dtype;
      input.weight = partial.weight;
      input.present = partial.present;
      inputs.push_back(input);
    }
  }
  return inputs;
}

std::optional<Bridge::Waiting> Bridge::OldestPartial() const {
  std::optional<Waiting> oldest;
  for (const auto& [key, received] : partials_) {
    if (oldest.has_value() && oldest->since <= received.since) continue;
    oldest = {key.first, key.second, received.by_peer.begin()->first, received.since};
  }
  return oldest;
}

void Bridge::Forget(uint32_t unit, Tag tag) { partials_.erase({unit, tag}); }

}  // namespace zeroshard
