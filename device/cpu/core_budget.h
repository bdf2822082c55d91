// CoreBudget: the cores of a machine, shared out among the workers of all jobs, so that never more
// of their threads are runnable than there are cores.
//
// A page of shared memory holds one token a core, by NUMA node. A worker takes tokens of its node
// when it starts a parallel pass, one for each thread that will run, and gives them back at the
// end. A token is the number of its holder or 0, and nothing else counts what is taken. So a
// process may be killed between any two instructions: the bound holds, and whoever saw it die gives
// its tokens back with one call.
//
// Who waits stands in a queue, first come first served: it gets at least one token, and more only
// as far as there are more than others wait for. A pass never waits for another process, so tokens
// come back; a holder that keeps them beyond kPatience is stopped or starved, thus not runnable,
// and the one in front then runs one thread without a token (counted as an overdraft).
//
// Owner: the server, which formats the page, gives every worker process a holder's number and takes
// it back after its death. Workers map the page read-write. Methods may be called from any thread
// of any process, but each holder's Acquire and Release by one thread at a time.
#ifndef ZEROSHARD_DEVICE_CPU_CORE_BUDGET_H_
#define ZEROSHARD_DEVICE_CPU_CORE_BUDGET_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "device/cpu/numa_cores.h"

namespace zeroshard {

struct CoreBudgetPage;

class CoreBudget {
 public:
  static constexpr uint32_t kMaxHolders = 254;
  static constexpr absl::Duration kPatience = absl::Seconds(2);

  static size_t Bytes();

  // Formats `memory` (zeroed, at least Bytes() long, page-aligned) with the cores of `nodes`. Nodes
  // and cores beyond what the page has room for are left out.
  static absl::StatusOr<CoreBudget> Format(std::span<std::byte> memory,
                                           const std::vector<NumaCores>& nodes);
  // A page that the server formatted. DataLoss when it is none of this version.
  static absl::StatusOr<CoreBudget> Adopt(std::span<std::byte> memory);

  uint32_t nodes() const;
  std::vector<int> Cpus(uint32_t node) const;
  uint32_t NodeOf(uint32_t holder) const;

  // A number from 0 for a worker of NUMA node `node`. ResourceExhausted when all are given out.
  absl::StatusOr<uint32_t> AddHolder(uint32_t node) const;
  // The holder's process has ended: takes back its tokens and its place in the queue.
  void RemoveHolder(uint32_t holder) const;

  // Takes 1 to `wanted` tokens and returns how many threads may run; waits while there is none.
  // Each Acquire is followed by one Release.
  int Acquire(uint32_t holder, int wanted, absl::Duration patience = kPatience) const;
  void Release(uint32_t holder) const;

  struct Usage {
    uint32_t cores = 0;
    uint32_t in_use = 0;
    uint32_t waiting = 0;
    // Since the page was formatted.
    double busy_seconds = 0;  // of tokens
    double wait_seconds = 0;  // of holders
    uint64_t overdrafts = 0;
  };
  Usage usage(uint32_t node) const;

 private:
  explicit CoreBudget(CoreBudgetPage* page) : page_(page) {}
  int Take(uint32_t holder, int wanted) const;
  bool IsFirst(uint32_t holder) const;
  uint32_t Waiting(uint32_t node) const;
  void WakeWaiters(uint32_t node) const;

  CoreBudgetPage* page_;
};

// The part of a budget that one worker process uses.
struct CoreShare {
  CoreBudget budget;
  uint32_t holder = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_CORE_BUDGET_H_
