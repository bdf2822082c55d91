#include "worker/bridge.h"

#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "base/status.h"
#include "worker/bridge_frames.h"

namespace zeroshard {
namespace {

Frame MakeFrame(BridgeFrame kind, uint32_t index, uint64_t tag, uint64_t value = 0) {
  return {static_cast<uint32_t>(kind), index, tag, value, {}};
}

// Marks the value as sent; whether it was not before.
bool Update(uint64_t& sent, uint64_t now) { return std::exchange(sent, now) != now; }

}  // namespace

absl::StatusOr<std::unique_ptr<Bridge>> Bridge::Create(EngineContext& context, const Shard& shard,
                                                       ThreadPool& pool, Mesh& mesh,
                                                       LocalInput local_input) {
  std::unique_ptr<Bridge> bridge(new Bridge(context, shard, pool, mesh, std::move(local_input)));
  ZS_RETURN_IF_ERROR(bridge->PlanSums());
  bridge->OnConnected();
  return bridge;
}

Bridge::Bridge(EngineContext& context, const Shard& shard, ThreadPool& pool, Mesh& mesh,
               LocalInput local_input)
    : context_(context),
      shard_(shard),
      pool_(pool),
      mesh_(mesh),
      local_input_(std::move(local_input)) {}

absl::Status Bridge::PlanSums() {
  const JobMemory& memory = context_.memory();
  ZS_ASSIGN_OR_RETURN(
      const ReductionTree tree,
      ReductionTree::Create(memory.ranks(), std::max(1u, memory.config().reduction_group())));
  ranks_of_.resize(memory.workers());
  for (uint32_t rank = 0; rank < memory.ranks(); ++rank) {
    ranks_of_[memory.start().ranks(rank).home_worker()].push_back(rank);
  }
  std::vector<TreeNode> all;
  for (uint32_t rank : ranks_of_[context_.me()]) all.push_back({rank, rank + 1});
  for (uint32_t worker = 0; worker < memory.workers(); ++worker) {
    ZS_ASSIGN_OR_RETURN(nodes_.emplace_back(), tree.Cover(ranks_of_[worker]));
    if (worker != context_.me())
      all.insert(all.end(), nodes_[worker].begin(), nodes_[worker].end());
  }
  ZS_ASSIGN_OR_RETURN(plan_, tree.Plan(tree.root(), all));
  for (const TreeNode& node : nodes_[context_.me()]) {
    std::vector<TreeNode> leaves;
    for (uint32_t rank = node.begin; rank < node.end; ++rank) leaves.push_back({rank, rank + 1});
    ZS_ASSIGN_OR_RETURN(node_plans_.emplace_back(), tree.Plan(node, leaves));
  }
  return absl::OkStatus();
}

void Bridge::OnConnected() {
  const size_t units = context_.layout().units().size();
  const uint32_t ranks = context_.memory().ranks();
  Sent nothing;
  nothing.partial.resize(units);
  nothing.merged.resize(units);
  nothing.pulled.resize(units);
  nothing.pull.resize(units);
  nothing.initialized.resize(units);
  nothing.order.resize(ranks);
  nothing.arrival.resize(ranks);
  nothing.put.resize(ranks);
  nothing.contribution.resize(units);
  nothing.micro_end.resize(ranks);
  sent_.assign(context_.memory().workers(), nothing);
  pulls_.clear();
}

void Bridge::Post(uint32_t peer, Frame frame) {
  context_.counters().wire_bytes += sizeof(uint64_t) * 4 + frame.payload.size();
  mesh_.Send(peer, std::move(frame));
}

bool Bridge::Advance() {
  const uint64_t attempt = context_.board().attempt();
  const uint64_t generation = context_.board().header().generation.load();
  if (attempt != attempt_ || generation != generation_) {
    attempt_ = attempt;
    generation_ = generation;
    std::erase_if(partials_,
                  [&](const auto& entry) { return AttemptOf(entry.first.second) < attempt; });
    for (auto& [peer, frame] : std::exchange(early_, {})) OnFrame(peer, std::move(frame));
  }
  bool progress = AnswerPulls();
  auto each_peer = [&](auto send) {
    for (uint32_t peer = 0; peer < context_.memory().workers(); ++peer) {
      if (peer != context_.me()) send(peer);
    }
  };
  each_peer([&](uint32_t peer) {
    for (uint32_t rank : ranks_of_[context_.me()]) {
      progress |= SendPut(peer, rank);
      progress |= SendOrder(peer, rank);
    }
  });
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    each_peer([&](uint32_t peer) {
      progress |= SendUnitMarks(peer, unit);
      progress |= has_data_plane() ? SendContribution(peer, unit) : SendPartial(peer, unit);
    });
  }
  encoded_ = {};
  each_peer([&](uint32_t peer) {
    for (uint32_t rank : ranks_of_[context_.me()]) {
      if (has_data_plane()) progress |= SendMicroEnd(peer, rank);
      progress |= SendArrival(peer, rank);
    }
    progress |= SendWorkerMarks(peer);
  });
  return progress;
}

bool Bridge::SendOrder(uint32_t peer, uint32_t rank) {
  const RankSlot& slot = context_.board().rank(rank);
  const uint64_t end = slot.order_end.load(std::memory_order_acquire);
  uint64_t& sent = sent_[peer].order[rank];
  if (sent == end || end >> 32 != (attempt_ & 0xffffffff)) return false;
  const uint64_t last = end & 0xffffffff;
  uint64_t first = sent >> 32 == end >> 32 ? std::min(sent & 0xffffffff, last) : 0;
  if (last > kOrderRing) first = std::max(first, last - kOrderRing);
  Frame frame = MakeFrame(BridgeFrame::kOrder, rank, attempt_, first);
  ByteWriter writer;
  for (uint64_t index = first; index < last; ++index) {
    writer.Value(static_cast<uint32_t>(slot.order[index % kOrderRing].load() & 0xffffff));
  }
  frame.payload = writer.Take();
  sent = end;
  Post(peer, std::move(frame));
  return true;
}

bool Bridge::SendArrival(uint32_t peer, uint32_t rank) {
  const RankSlot& slot = context_.board().rank(rank);
  const uint64_t arrival = slot.arrival.load(std::memory_order_acquire);
  if (arrival != attempt_ || !Update(sent_[peer].arrival[rank], arrival)) return false;
  Frame frame = MakeFrame(BridgeFrame::kArrival, rank, arrival);
  ByteWriter writer;
  writer.Value(slot.input);
  writer.Bytes(context_.memory().user_states().Read(rank, arrival));
  frame.payload = writer.Take();
  Post(peer, std::move(frame));
  return true;
}

bool Bridge::SendPut(uint32_t peer, uint32_t rank) {
  const Board& board = context_.board();
  const RankSlot& slot = board.rank(rank);
  const uint64_t tag = slot.put_tag.load(std::memory_order_acquire);
  if (board.put_done(peer, rank).load() >= tag || !Update(sent_[peer].put[rank], tag)) return false;
  const uint64_t bytes = slot.put_elements * SizeOf(context_.layout().units()[slot.put_unit].dtype);
  Frame frame = MakeFrame(BridgeFrame::kPut, rank, tag, slot.put_unit);
  ByteWriter writer;
  writer.Value(slot.put_offset);
  writer.Value(slot.put_elements);
  writer.Bytes({context_.memory().gradient_window(rank).data() + slot.put_window_offset, bytes});
  frame.payload = writer.Take();
  Post(peer, std::move(frame));
  return true;
}

bool Bridge::SendUnitMarks(uint32_t peer, uint32_t unit) {
  const Board& board = context_.board();
  Sent& sent = sent_[peer];
  bool progress = false;
  const Tag merged = board.merged(context_.me(), unit).tag.load(std::memory_order_acquire);
  if (merged != 0 && Update(sent.merged[unit], merged)) {
    Post(peer, MakeFrame(BridgeFrame::kMerged, unit, merged));
    progress = true;
  }
  if (sent.initialized[unit] == 0 && board.initialized(context_.me(), unit).load() != 0) {
    sent.initialized[unit] = 1;
    Post(peer, MakeFrame(BridgeFrame::kInitialized, unit, 0));
    progress = true;
  }
  if (context_.memory().plan().unit(unit).resident) return progress;
  const uint64_t epoch = board.wanted(unit).load();
  if (epoch != 0 && board.fill(peer, unit).load() != epoch && Update(sent.pulled[unit], epoch)) {
    SendPull(peer, unit, epoch);
    progress = true;
  }
  return progress;
}

bool Bridge::SendWorkerMarks(uint32_t peer) {
  const Board& board = context_.board();
  const WorkerSlot& mine = board.worker(context_.me());
  Sent& sent = sent_[peer];
  bool progress = false;
  const uint64_t ready = mine.ready.load(std::memory_order_acquire);
  if (ready == attempt_ && Update(sent.ready, ready)) {
    Frame frame = MakeFrame(BridgeFrame::kReady, 0, ready);
    frame.payload.assign(mine.norm, mine.norm + sizeof(mine.norm));
    Post(peer, std::move(frame));
    progress = true;
  }
  const BoardHeader& header = board.header();
  const uint64_t drop = header.drop_generation.load(std::memory_order_acquire);
  if (context_.is_leader() && drop != 0 && Update(sent.drop, drop)) {
    Frame frame = MakeFrame(BridgeFrame::kDrop, 0, header.drop_until, header.drop_after);
    ByteWriter writer;
    writer.Value(drop);
    frame.payload = writer.Take();
    Post(peer, std::move(frame));
    progress = true;
  }
  const Decision& decision = board.header().decision;
  const uint64_t decided = decision.attempt.load(std::memory_order_acquire);
  if (context_.is_leader() && decided != 0 && Update(sent.decision, decided)) {
    Frame frame = MakeFrame(BridgeFrame::kDecision, 0, decided);
    const auto* bytes = reinterpret_cast<const std::byte*>(&decision.skip);
    frame.payload.assign(bytes, reinterpret_cast<const std::byte*>(&decision + 1));
    Post(peer, std::move(frame));
    progress = true;
  }
  const uint64_t applied = mine.applied.load(std::memory_order_acquire);
  if (applied != 0 && Update(sent.applied, applied)) {
    // First the new parameters, then the word that they are complete.
    PushShards(peer);
    Post(peer, MakeFrame(BridgeFrame::kApplied, 0, applied));
    progress = true;
  }
  const uint64_t poisoned = board.header().poisoned.load(std::memory_order_acquire);
  if (!context_.poison().ok() && Update(sent.poisoned, poisoned)) {
    const uint64_t generation = board.header().generation.load();
    Frame frame = MakeFrame(BridgeFrame::kPoison, 0, generation, poisoned & 0xff);
    const std::string text(context_.poison().message());
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    frame.payload.assign(bytes, bytes + text.size());
    Post(peer, std::move(frame));
    progress = true;
  }
  return progress;
}

void Bridge::PushShards(uint32_t peer) {
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    const UnitPlan& plan = context_.memory().plan().unit(unit);
    if (plan.resident && plan.has_optimizer && plan.shard.size() > 0) SendShard(peer, unit, 0, 0);
  }
}

void Bridge::SendPull(uint32_t peer, uint32_t unit, uint64_t epoch) {
  sent_[peer].pull[unit] = ++last_pull_;
  Frame frame = MakeFrame(BridgeFrame::kPull, unit, last_pull_, epoch);
  ByteWriter writer;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    writer.Value(context_.board().put_done(context_.me(), rank).load(std::memory_order_acquire));
  }
  // The epoch of a step that is decided may be seen a little before its commit.
  const Board& board = context_.board();
  const uint64_t attempt = board.attempt();
  const uint64_t decided = board.header().decision.attempt.load(std::memory_order_acquire);
  writer.Value(decided == attempt ? attempt : board.committed_attempt());
  frame.payload = writer.Take();
  Post(peer, std::move(frame));
}

void Bridge::SendShard(uint32_t peer, uint32_t unit, uint64_t number, uint64_t epoch) {
  const GrainRange shard = context_.memory().plan().unit(unit).shard;
  const uint64_t element_bytes = SizeOf(context_.layout().units()[unit].dtype);
  std::vector<std::byte> read;
  const std::byte* data =
      context_.memory().parameters_at_rest(unit) + shard.first_element() * element_bytes;
  if (!context_.memory().plan().unit(unit).resident && shard_.OnTier(unit)) {
    read.resize(shard.elements() * element_bytes);
    if (const absl::Status status = shard_.ReadParameters(unit, read); !status.ok()) {
      context_.Poison(status);
      return;
    }
    data = read.data();
  }
  ZS_FAULT_POINT("worker.bridge.shard");
  Frame frame = MakeFrame(BridgeFrame::kShard, unit, number, epoch);
  ByteWriter writer;
  writer.Bytes({data, shard.elements() * element_bytes});
  frame.payload = writer.Take();
  Post(peer, std::move(frame));
}

}  // namespace zeroshard
