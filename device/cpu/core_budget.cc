#include "device/cpu/core_budget.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "absl/strings/str_cat.h"
#include "base/futex.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x746567647562635aull;  // "Zcbudget"
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxNodes = 16;
constexpr uint32_t kMaxCores = 512;

int64_t NowNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

}  // namespace

struct CoreBudgetPage {
  struct alignas(64) Holder {
    std::atomic<uint32_t> in_use;  // 0 or 1
    std::atomic<uint32_t> node;
    std::atomic<uint64_t> ticket;  // in the node's queue; 0 while it does not wait
    std::atomic<int64_t> since;    // when its tokens were taken
  };
  struct alignas(64) Node {
    uint32_t cores;
    std::atomic<uint32_t> freed;  // futex: raised when waiters should look again
    std::atomic<uint64_t> last_ticket;
    std::atomic<uint64_t> busy_nanos;
    std::atomic<uint64_t> wait_nanos;
    std::atomic<uint64_t> overdrafts;
    alignas(64) std::atomic<uint16_t> owner[kMaxCores];  // holder + 1, or 0
    int32_t cpu[kMaxCores];
  };

  uint64_t magic;
  uint32_t version;
  uint32_t nodes;
  std::atomic<uint32_t> holders;  // numbers that were ever given out are below it
  Holder holder[CoreBudget::kMaxHolders];
  Node node[kMaxNodes];

  Node& NodeOf(uint32_t h) { return node[holder[h].node.load(std::memory_order_relaxed)]; }
};

static_assert(std::atomic<uint16_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

size_t CoreBudget::Bytes() { return (sizeof(CoreBudgetPage) + 4095) / 4096 * 4096; }

absl::StatusOr<CoreBudget> CoreBudget::Format(std::span<std::byte> memory,
                                              const std::vector<NumaCores>& nodes) {
  if (memory.size() < Bytes() || nodes.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("a core budget needs ", Bytes(),
                                                   " bytes and a NUMA node, found ", memory.size(),
                                                   " and ", nodes.size()));
  }
  auto* page = new (memory.data()) CoreBudgetPage();
  page->nodes = static_cast<uint32_t>(std::min<size_t>(nodes.size(), kMaxNodes));
  for (uint32_t n = 0; n < page->nodes; ++n) {
    CoreBudgetPage::Node& node = page->node[n];
    node.cores = static_cast<uint32_t>(std::min<size_t>(nodes[n].cpus.size(), kMaxCores));
    if (node.cores == 0) {
      return absl::InvalidArgumentError(absl::StrCat("NUMA node ", n, " has no cores"));
    }
    std::copy_n(nodes[n].cpus.begin(), node.cores, node.cpu);
  }
  page->version = kVersion;
  page->magic = kMagic;
  return CoreBudget(page);
}

absl::StatusOr<CoreBudget> CoreBudget::Adopt(std::span<std::byte> memory) {
  auto* page = reinterpret_cast<CoreBudgetPage*>(memory.data());
  if (memory.size() < Bytes() || page->magic != kMagic || page->version != kVersion ||
      page->nodes == 0 || page->nodes > kMaxNodes) {
    return absl::DataLossError("the region is no core budget of this version");
  }
  return CoreBudget(page);
}

uint32_t CoreBudget::nodes() const { return page_->nodes; }

std::vector<int> CoreBudget::Cpus(uint32_t node) const {
  const CoreBudgetPage::Node& from = page_->node[node];
  return {from.cpu, from.cpu + from.cores};
}

uint32_t CoreBudget::NodeOf(uint32_t holder) const {
  return page_->holder[holder].node.load(std::memory_order_relaxed);
}

absl::StatusOr<uint32_t> CoreBudget::AddHolder(uint32_t node) const {
  for (uint32_t h = 0; h < kMaxHolders; ++h) {
    CoreBudgetPage::Holder& holder = page_->holder[h];
    uint32_t free = 0;
    if (!holder.in_use.compare_exchange_strong(free, 1)) continue;
    holder.node.store(node);
    holder.ticket.store(0);
    uint32_t below = page_->holders.load();
    while (below <= h && !page_->holders.compare_exchange_weak(below, h + 1)) {
    }
    return h;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("this daemon runs ", kMaxHolders, " workers already, its limit"));
}

void CoreBudget::RemoveHolder(uint32_t holder) const {
  const uint32_t node = page_->holder[holder].node.load();
  page_->holder[holder].ticket.store(0);
  for (uint32_t core = 0; core < page_->node[node].cores; ++core) {
    auto mine = static_cast<uint16_t>(holder + 1);
    page_->node[node].owner[core].compare_exchange_strong(mine, 0);
  }
  page_->holder[holder].in_use.store(0);
  WakeWaiters(node);
}

int CoreBudget::Take(uint32_t holder, int wanted) const {
  CoreBudgetPage::Node& node = page_->NodeOf(holder);
  int taken = 0;
  for (uint32_t core = 0; core < node.cores && taken < wanted; ++core) {
    uint16_t free = 0;
    if (node.owner[core].load() != 0) continue;
    const auto mine = static_cast<uint16_t>(holder + 1);
    if (node.owner[core].compare_exchange_strong(free, mine)) ++taken;
  }
  return taken;
}

uint32_t CoreBudget::Waiting(uint32_t node) const {
  uint32_t waiting = 0;
  const uint32_t holders = page_->holders.load(std::memory_order_acquire);
  for (uint32_t h = 0; h < holders; ++h) {
    const CoreBudgetPage::Holder& holder = page_->holder[h];
    waiting += holder.ticket.load() != 0 && holder.node.load(std::memory_order_relaxed) == node;
  }
  return waiting;
}

bool CoreBudget::IsFirst(uint32_t holder) const {
  const uint32_t node = page_->holder[holder].node.load(std::memory_order_relaxed);
  const uint64_t mine = page_->holder[holder].ticket.load();
  const uint32_t holders = page_->holders.load(std::memory_order_acquire);
  for (uint32_t h = 0; h < holders; ++h) {
    const uint64_t ticket = page_->holder[h].ticket.load();
    const bool here = page_->holder[h].node.load(std::memory_order_relaxed) == node;
    if (here && ticket != 0 && ticket < mine) return false;
  }
  return true;
}

// A waiter writes its ticket and then looks at the tokens; who frees one looks at the tickets after
// it. All of these are sequentially consistent, so one of the two sees the other.
void CoreBudget::WakeWaiters(uint32_t node) const {
  if (Waiting(node) == 0) return;
  page_->node[node].freed.fetch_add(1);
  FutexWakeAll(page_->node[node].freed);
}

int CoreBudget::Acquire(uint32_t holder, int wanted, absl::Duration patience) const {
  CoreBudgetPage::Holder& self = page_->holder[holder];
  const uint32_t node_index = self.node.load(std::memory_order_relaxed);
  CoreBudgetPage::Node& node = page_->node[node_index];
  int taken = Waiting(node_index) == 0 ? Take(holder, wanted) : 0;
  const int64_t start = NowNanos();
  if (taken > 0) {
    self.since.store(start, std::memory_order_relaxed);
    return taken;
  }
  self.ticket.store(node.last_ticket.fetch_add(1) + 1);
  int64_t now = start;
  while (taken == 0) {
    const uint32_t freed = node.freed.load();
    if (IsFirst(holder)) taken = Take(holder, 1);
    if (taken > 0) break;
    const absl::Duration left = patience - absl::Nanoseconds(now - start);
    if (left <= absl::ZeroDuration()) {
      node.overdrafts.fetch_add(1, std::memory_order_relaxed);
      break;
    }
    FutexWait(node.freed, freed, left);
    now = NowNanos();
  }
  if (taken > 0) {
    const Usage now_used = usage(node_index);
    const int spare = static_cast<int>(now_used.cores) - static_cast<int>(now_used.in_use) -
                      static_cast<int>(now_used.waiting - 1);
    if (spare > 0) taken += Take(holder, std::min(spare, wanted - 1));
  }
  self.ticket.store(0);
  WakeWaiters(node_index);  // the next in the queue may find a token
  now = NowNanos();
  node.wait_nanos.fetch_add(static_cast<uint64_t>(now - start), std::memory_order_relaxed);
  self.since.store(now, std::memory_order_relaxed);
  return std::max(1, taken);
}

void CoreBudget::Release(uint32_t holder) const {
  CoreBudgetPage::Holder& self = page_->holder[holder];
  const uint32_t node_index = self.node.load(std::memory_order_relaxed);
  CoreBudgetPage::Node& node = page_->node[node_index];
  const auto mine = static_cast<uint16_t>(holder + 1);
  uint64_t held = 0;
  for (uint32_t core = 0; core < node.cores; ++core) {
    if (node.owner[core].load(std::memory_order_relaxed) != mine) continue;
    node.owner[core].store(0);
    ++held;
  }
  const auto nanos = static_cast<uint64_t>(NowNanos() - self.since.load());
  node.busy_nanos.fetch_add(held * nanos, std::memory_order_relaxed);
  WakeWaiters(node_index);
}

CoreBudget::Usage CoreBudget::usage(uint32_t node) const {
  const CoreBudgetPage::Node& from = page_->node[node];
  Usage usage;
  usage.cores = from.cores;
  for (uint32_t core = 0; core < from.cores; ++core) usage.in_use += from.owner[core].load() != 0;
  usage.waiting = Waiting(node);
  usage.busy_seconds = static_cast<double>(from.busy_nanos.load()) * 1e-9;
  usage.wait_seconds = static_cast<double>(from.wait_nanos.load()) * 1e-9;
  usage.overdrafts = from.overdrafts.load();
  return usage;
}

}  // namespace zeroshard
