// A fixed pool of threads for one device of a host (a NUMA node, or the whole machine).
//
// Owner: the worker's composition root; one pool per worker. With a share of the node's core budget
// a pass runs on as many threads as it gets cores for, at least one, and waits while there is none;
// all lanes are run all the same, some after others. Nothing survives failure: the pool holds no
// state.
//
// Threads: ParallelFor may be called from any thread, one call at a time (a second caller waits);
// never from inside a task. The calling thread works as lane 0, so a pool of n lanes owns n-1
// threads and n = 1 runs inline.
//
// Numerics: every lane runs with the same MXCSR (round to nearest, no flush-to-zero, no
// denormals-are-zero), the caller's own being put back afterwards. Items are assigned to lanes
// statically and a lane is run by one thread, so results never depend on timing or on the cores.
#ifndef ZEROSHARD_DEVICE_CPU_THREAD_POOL_H_
#define ZEROSHARD_DEVICE_CPU_THREAD_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "device/cpu/affinity.h"
#include "device/cpu/core_budget.h"

namespace zeroshard {

struct ThreadPoolOptions {
  int threads = 1;             // lanes, the caller's included; at least 1
  std::vector<int> cpus = {};  // processors the threads may run on; empty: those of the process
  bool pin = false;            // bind each owned thread to one processor of `cpus`, in turn
  // Raised with every item that is done, for whoever watches; may be null, must outlive the pool.
  std::atomic<uint64_t>* progress = nullptr;
  // What the pool's passes take their cores from; without it every pass runs on all lanes.
  std::optional<CoreShare> cores = std::nullopt;
};

struct ItemRange {
  size_t begin = 0;
  size_t end = 0;
};

// The items of `lane`: [ceil(items*lane/lanes), ceil(items*(lane+1)/lanes)), contiguous and in
// order, so that a single item falls to lane 0.
ItemRange ItemsOfLane(size_t items, int lane, int lanes);

// Holds the floating-point control state that all kernels run under, for the life of the object, on
// this thread.
class ScopedKernelFloatState {
 public:
  ScopedKernelFloatState();
  ~ScopedKernelFloatState();
  ScopedKernelFloatState(const ScopedKernelFloatState&) = delete;
  ScopedKernelFloatState& operator=(const ScopedKernelFloatState&) = delete;

 private:
  uint32_t saved_;
};

class ThreadPool {
 public:
  // InvalidArgument for threads < 1 or processors outside the process's set.
  static absl::StatusOr<std::unique_ptr<ThreadPool>> Create(const ThreadPoolOptions& options);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int lanes() const { return lanes_; }

  // Calls fn(item, lane) once for each item in [0, items), each lane its ItemsOfLane in increasing
  // order; returns when all are done. What the tasks wrote is visible to the caller then.
  void ParallelFor(size_t items, absl::FunctionRef<void(size_t item, int lane)> fn);

 private:
  struct Shared;

  explicit ThreadPool(int lanes);
  absl::Status Start(const ThreadPoolOptions& options);

  const int lanes_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_THREAD_POOL_H_
