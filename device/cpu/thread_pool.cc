#include "device/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// All exceptions masked, round to nearest, no flush-to-zero, no denormals-are-zero.
constexpr uint32_t kKernelMxcsr = 0x1f80;
// Turns of a waiting thread before it sleeps: a few microseconds, the distance between two passes.
constexpr int kSpins = 200;

thread_local bool inside_task = false;

void WaitUntilChanged(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  word.wait(old, std::memory_order_acquire);
}

}  // namespace

ItemRange ItemsOfLane(size_t items, int lane, int lanes) {
  const auto n = static_cast<unsigned __int128>(items);
  const auto l = static_cast<unsigned __int128>(lanes);
  return {.begin = static_cast<size_t>((n * lane + l - 1) / l),
          .end = static_cast<size_t>((n * (lane + 1) + l - 1) / l)};
}

ScopedKernelFloatState::ScopedKernelFloatState() : saved_(_mm_getcsr()) {
  _mm_setcsr(kKernelMxcsr);
}

ScopedKernelFloatState::~ScopedKernelFloatState() { _mm_setcsr(saved_); }

// A pass runs all lanes on 1 to `lanes` threads, the caller's first. Each thread begins with the
// lane of its own number, the same in every pass, and then takes those that nobody has begun.
struct ThreadPool::Shared {
  struct alignas(64) Owned {
    std::atomic<uint32_t> passes = 0;  // that the thread was called to
    std::thread thread;
  };

  std::mutex call_mutex;                      // one ParallelFor at a time
  std::atomic<uint64_t>* progress = nullptr;  // set before any thread starts
  std::optional<CoreShare> cores;             // likewise
  // Written by the caller before `passes` of a thread changes.
  size_t items = 0;
  int lanes = 1;
  const absl::FunctionRef<void(size_t, int)>* task = nullptr;
  bool stopping = false;
  std::atomic<int> next_lane = 0;
  std::atomic<uint32_t> busy = 0;      // owned threads that are not done
  std::atomic<uint32_t> finished = 0;  // passes whose owned threads are all done
  std::vector<std::unique_ptr<Owned>> threads;

  void RunLane(int lane) {
    const ItemRange range = ItemsOfLane(items, lane, lanes);
    for (size_t item = range.begin; item < range.end; ++item) {
      (*task)(item, lane);
      if (progress != nullptr) progress->fetch_add(1, std::memory_order_relaxed);
    }
  }

  void RunLanes(int first) {
    inside_task = true;
    for (int lane = first; lane < lanes; lane = next_lane.fetch_add(1)) RunLane(lane);
    inside_task = false;
  }

  void ThreadMain(Owned& self, int number) {
    const ScopedKernelFloatState float_state;
    for (uint32_t seen = 0;; ++seen) {
      WaitUntilChanged(self.passes, seen);
      if (stopping) return;
      RunLanes(number);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        finished.fetch_add(1, std::memory_order_release);
        finished.notify_all();
      }
    }
  }

  // Calls `count` owned threads to the pass that is set up.
  void Call(int count) {
    for (int thread = 0; thread < count; ++thread) {
      threads[thread]->passes.fetch_add(1, std::memory_order_release);
      threads[thread]->passes.notify_one();
    }
  }

  void Run(int running) {
    next_lane.store(running, std::memory_order_relaxed);
    if (running == 1) return RunLanes(0);
    busy.store(static_cast<uint32_t>(running - 1), std::memory_order_relaxed);
    const uint32_t before = finished.load(std::memory_order_relaxed);
    Call(running - 1);
    RunLanes(0);
    WaitUntilChanged(finished, before);
  }
};

ThreadPool::ThreadPool(int lanes) : lanes_(lanes), shared_(std::make_unique<Shared>()) {}

absl::StatusOr<std::unique_ptr<ThreadPool>> ThreadPool::Create(const ThreadPoolOptions& options) {
  if (options.threads < 1 || options.threads > CPU_SETSIZE) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pool needs 1 to ", CPU_SETSIZE, " threads, found ", options.threads));
  }
  const std::vector<int> allowed = AllowedCpus();
  for (int cpu : options.cpus) {
    if (std::find(allowed.begin(), allowed.end(), cpu) == allowed.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("processor ", cpu, " is not allowed to this process"));
    }
  }
  std::unique_ptr<ThreadPool> pool(new ThreadPool(options.threads));
  pool->shared_->lanes = options.threads;
  pool->shared_->progress = options.progress;
  pool->shared_->cores = options.cores;
  ZS_RETURN_IF_ERROR(pool->Start(options));
  return pool;
}

absl::Status ThreadPool::Start(const ThreadPoolOptions& options) {
  const std::vector<int> cpus = options.cpus.empty() ? AllowedCpus() : options.cpus;
  for (int number = 1; number < lanes_; ++number) {
    shared_->threads.push_back(std::make_unique<Shared::Owned>());
    Shared::Owned& owned = *shared_->threads.back();
    owned.thread = std::thread(
        [shared = shared_.get(), &owned, number] { shared->ThreadMain(owned, number); });
    cpu_set_t set;
    CPU_ZERO(&set);
    if (options.pin && !cpus.empty()) {
      CPU_SET(cpus[static_cast<size_t>(number) % cpus.size()], &set);
    } else {
      for (int cpu : cpus) CPU_SET(cpu, &set);
    }
    const int error = pthread_setaffinity_np(owned.thread.native_handle(), sizeof(set), &set);
    if (error != 0) return ErrnoError(error, "pthread_setaffinity_np", "thread of the pool");
  }
  return absl::OkStatus();
}

ThreadPool::~ThreadPool() {
  shared_->stopping = true;
  shared_->Call(static_cast<int>(shared_->threads.size()));
  for (const auto& owned : shared_->threads) owned->thread.join();
}

void ThreadPool::ParallelFor(size_t items, absl::FunctionRef<void(size_t item, int lane)> fn) {
  ZS_CHECK(!inside_task, "ParallelFor from inside a task");
  if (items == 0) return;
  const std::lock_guard<std::mutex> lock(shared_->call_mutex);
  const ScopedKernelFloatState float_state;
  shared_->items = items;
  shared_->task = &fn;
  const int wanted = static_cast<int>(std::min<size_t>(items, static_cast<size_t>(lanes_)));
  if (!shared_->cores.has_value()) return shared_->Run(wanted);
  const CoreShare& cores = *shared_->cores;
  shared_->Run(cores.budget.Acquire(cores.holder, wanted));
  cores.budget.Release(cores.holder);
}

}  // namespace zeroshard
