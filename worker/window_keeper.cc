#include "worker/window_keeper.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/shared_memory.h"
#include "base/status.h"

namespace zeroshard {

bool WindowKeeper::IsToBeFilled(uint32_t unit) {
  if (context_.memory().plan().unit(unit).resident) return false;
  const Board& board = context_.board();
  const uint64_t epoch = board.header().epoch.load();
  if (board.wanted(unit).load() != epoch || board.evicting(unit).load() != 0) return false;
  wanted_at_.resize(context_.layout().units().size());
  wanted_at_[unit] = ++last_wanted_;
  return board.fill(context_.me(), unit).load() != epoch;
}

absl::StatusOr<bool> WindowKeeper::Fill(std::span<const uint32_t> units, const Shard& shard) {
  struct Wanted {
    uint32_t unit;
    uint64_t before;
  };
  const Board& board = context_.board();
  const uint64_t epoch = board.header().epoch.load();
  std::vector<Wanted> wanted;
  std::vector<uint32_t> to_copy;
  for (const uint32_t unit : units) {
    if (!IsToBeFilled(unit)) continue;
    wanted.push_back({unit, board.fill(context_.me(), unit).load()});
    to_copy.push_back(unit);
  }
  if (wanted.empty()) return false;
  ZS_RETURN_IF_ERROR(shard.FillWindows(to_copy));
  ZS_FAULT_POINT("worker.window.before_filled");
  for (Wanted& copied : wanted) {
    context_.counters().copied_bytes +=
        context_.memory().plan().unit(copied.unit).shard.elements() *
        SizeOf(context_.layout().units()[copied.unit].dtype);
    // Fails only if the unit was evicted meanwhile, which takes a rank that died waiting for it.
    board.fill(context_.me(), copied.unit).compare_exchange_strong(copied.before, epoch);
  }
  context_.RingAll();
  return true;
}

bool WindowKeeper::IsFilled(uint32_t unit) const {
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    if (context_.board().fill(worker, unit).load() == 0) return false;
  }
  return true;
}

bool WindowKeeper::IsPinned(uint32_t unit) const {
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    if ((context_.board().pins(rank, unit).load() & 0xffff) != 0) return true;
  }
  return false;
}

bool WindowKeeper::Evict() {
  if (!context_.is_island_leader()) return false;
  const std::span<const Unit> units = context_.layout().units();
  wanted_at_.resize(units.size());
  uint64_t live = 0;
  std::vector<uint32_t> candidates;
  for (uint32_t unit = 0; unit < units.size(); ++unit) {
    if (context_.memory().plan().unit(unit).resident || !IsFilled(unit)) continue;
    live += units[unit].data_elements;
    if (!IsPinned(unit)) candidates.push_back(unit);
  }
  // Ranks with a data plane copy what they gather alone; nothing is kept for the next one.
  const model::v1::EngineConfig& config = context_.memory().config();
  const uint64_t limit = config.data_plane() ? 0 : config.max_live_elements();
  std::sort(candidates.begin(), candidates.end(),
            [&](uint32_t a, uint32_t b) { return wanted_at_[a] < wanted_at_[b]; });
  bool evicted = false;
  for (uint32_t unit : candidates) {
    if (live <= limit) break;
    if (!EvictUnit(unit)) continue;
    live -= units[unit].data_elements;
    evicted = true;
  }
  if (evicted) context_.RingAll();
  return evicted;
}

void WindowKeeper::GiveBack(uint32_t unit) {
  if (!context_.is_island_leader() || context_.memory().plan().unit(unit).resident) return;
  if (!IsFilled(unit) || IsPinned(unit)) return;
  if (EvictUnit(unit)) context_.RingAll();
}

bool WindowKeeper::EvictUnit(uint32_t unit) {
  std::atomic<uint32_t>& evicting = context_.board().evicting(unit);
  evicting.store(1);
  if (IsPinned(unit)) {
    evicting.store(0);
    context_.RingAll();
    return false;
  }
  PunchUnit(unit);
  return true;
}

void WindowKeeper::PunchUnit(uint32_t unit) {
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    context_.board().fill(worker, unit).store(0);
  }
  context_.board().wanted(unit).store(0);
  ZS_FAULT_POINT("worker.window.before_punch");
  const Unit& layout_unit = context_.layout().units()[unit];
  // Units start at page boundaries, so the last page is this unit's alone.
  const uint64_t bytes =
      (layout_unit.bytes() + kWindowAlignment - 1) / kWindowAlignment * kWindowAlignment;
  const absl::Status status =
      PunchHole(context_.memory().window_fd(), layout_unit.window_offset, bytes);
  if (!status.ok()) {
    LogWarn(absl::StrCat("window pages not given back unit=", unit, " error=\"", status.message(),
                         "\""));
  }
  context_.board().evicting(unit).store(0);
}

void WindowKeeper::Recover() {
  if (!context_.is_island_leader()) return;
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    if (context_.board().evicting(unit).load() != 0) PunchUnit(unit);
  }
}

}  // namespace zeroshard
