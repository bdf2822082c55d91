#include "device/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
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

// Parses the kernel's list format, "0-3,8".
std::vector<int> ParseCpuList(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.c_str();
  while (std::isdigit(static_cast<unsigned char>(*at)) != 0) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    long last = first;
    if (*end == '-') last = std::strtol(end + 1, &end, 10);
    for (long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) {
      cpus.push_back(static_cast<int>(cpu));
    }
    at = *end == ',' ? end + 1 : end;
  }
  return cpus;
}

void WaitUntilChanged(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  word.wait(old, std::memory_order_acquire);
}

}  // namespace

std::vector<int> AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

absl::StatusOr<std::vector<int>> CpusOfNumaNode(int node) {
  const std::string path = absl::StrCat("/sys/devices/system/node/node", node, "/cpulist");
  std::ifstream file(path);
  std::string text;
  if (node < 0 || !std::getline(file, text)) {
    return absl::NotFoundError(absl::StrCat("no NUMA node ", node, " (", path, ")"));
  }
  const std::vector<int> of_node = ParseCpuList(text);
  std::vector<int> cpus;
  for (int cpu : AllowedCpus()) {
    if (std::find(of_node.begin(), of_node.end(), cpu) != of_node.end()) cpus.push_back(cpu);
  }
  if (cpus.empty()) {
    return absl::NotFoundError(absl::StrCat("none of the processors of NUMA node ", node, " (",
                                            text, ") is allowed to this process"));
  }
  return cpus;
}

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

// `round` counts calls of ParallelFor; a thread runs its part when it changes, and the last of them
// makes `finished` equal to it.
struct ThreadPool::Shared {
  std::mutex call_mutex;  // one ParallelFor at a time
  // Written by the caller before `round` changes.
  size_t items = 0;
  const absl::FunctionRef<void(size_t, int)>* task = nullptr;
  bool stopping = false;
  std::atomic<uint32_t> round = 0;
  std::atomic<uint32_t> busy = 0;
  std::atomic<uint32_t> finished = 0;
  std::vector<std::thread> threads;

  void RunLane(int lane, int lanes) {
    const ItemRange range = ItemsOfLane(items, lane, lanes);
    inside_task = true;
    for (size_t item = range.begin; item < range.end; ++item) (*task)(item, lane);
    inside_task = false;
  }

  void ThreadMain(int lane, int lanes) {
    const ScopedKernelFloatState float_state;
    for (uint32_t seen = 0;; ++seen) {
      WaitUntilChanged(round, seen);
      if (stopping) return;
      RunLane(lane, lanes);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        finished.store(seen + 1, std::memory_order_release);
        finished.notify_all();
      }
    }
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
  ZS_RETURN_IF_ERROR(pool->Start(options));
  return pool;
}

absl::Status ThreadPool::Start(const ThreadPoolOptions& options) {
  const std::vector<int> cpus = options.cpus.empty() ? AllowedCpus() : options.cpus;
  for (int lane = 1; lane < lanes_; ++lane) {
    shared_->threads.emplace_back(
        [shared = shared_.get(), lane, lanes = lanes_] { shared->ThreadMain(lane, lanes); });
    cpu_set_t set;
    CPU_ZERO(&set);
    if (options.pin && !cpus.empty()) {
      CPU_SET(cpus[static_cast<size_t>(lane) % cpus.size()], &set);
    } else {
      for (int cpu : cpus) CPU_SET(cpu, &set);
    }
    const int error =
        pthread_setaffinity_np(shared_->threads.back().native_handle(), sizeof(set), &set);
    if (error != 0) return ErrnoError(error, "pthread_setaffinity_np", "thread of the pool");
  }
  return absl::OkStatus();
}

ThreadPool::~ThreadPool() {
  shared_->stopping = true;
  shared_->round.fetch_add(1, std::memory_order_release);
  shared_->round.notify_all();
  for (std::thread& thread : shared_->threads) thread.join();
}

void ThreadPool::ParallelFor(size_t items, absl::FunctionRef<void(size_t item, int lane)> fn) {
  ZS_CHECK(!inside_task, "ParallelFor from inside a task");
  if (items == 0) return;
  const std::lock_guard<std::mutex> lock(shared_->call_mutex);
  const ScopedKernelFloatState float_state;
  shared_->items = items;
  shared_->task = &fn;
  if (lanes_ == 1 || items == 1) return shared_->RunLane(0, lanes_);
  shared_->busy.store(static_cast<uint32_t>(lanes_ - 1), std::memory_order_relaxed);
  const uint32_t previous = shared_->round.fetch_add(1, std::memory_order_release);
  shared_->round.notify_all();
  shared_->RunLane(0, lanes_);
  WaitUntilChanged(shared_->finished, previous);
}

}  // namespace zeroshard
