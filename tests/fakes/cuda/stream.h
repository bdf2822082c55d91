#ifndef ZEROSHARD_TESTS_FAKES_CUDA_STREAM_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_STREAM_H_

#include <cuda.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "tests/fakes/cuda/memory_map.h"

namespace zeroshard::fake_cuda {

class Stream;

// A context of a device; never deleted, so that a stale handle can be told. Its streams are ordered
// against its legacy stream under order_mu.
struct Context {
  int device = 0;  // index in the node
  bool primary = false;
  unsigned flags = 0;
  int retained = 0;  // guarded by the runtime's mutex, as `destroyed`
  bool destroyed = false;
  std::mutex order_mu;
  std::shared_ptr<Stream> legacy;              // guarded by order_mu
  std::vector<std::weak_ptr<Stream>> streams;  // guarded by order_mu
};

// The end of one piece of work.
class Completion {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void Finish(CUresult result);
  bool Done();
  // Waits without bound: work that hangs is ended by a loss or a reset.
  CUresult Wait();
  CUresult result();
  Time time();  // when it was done

 private:
  std::mutex mu_;
  std::condition_variable done_;
  bool is_done_ = false;            // guarded by mu_
  CUresult result_ = CUDA_SUCCESS;  // guarded by mu_
  Time time_;                       // guarded by mu_
};

// One thing that a stream does.
struct Work {
  const char* name = "";
  std::vector<Range> ranges;                        // memory it touches
  std::function<std::vector<Range>()> more_ranges;  // asked for when its turn has come
  std::function<CUresult()> run;                    // an error loses the device
  std::function<void()> drop;                       // instead of run, on a lost device
  std::vector<std::shared_ptr<Completion>> after;   // of other streams
  bool counts = true;                               // for lost:<k>, hang:<k> and jitter
  bool is_callback = false;                         // may not call the driver
};

// Does work in order, on a thread of its own that ends when the stream was closed and is empty.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Context* context, unsigned flags, int priority, uint64_t number);

  void Start();
  std::shared_ptr<Completion> Enqueue(Work work);
  void Close();

  // Of the last work; null when there was none.
  std::shared_ptr<Completion> Last();
  CUresult Synchronize();

  Context* context() const { return context_; }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }
  uint64_t number() const { return number_; }
  bool IsLegacy() const { return number_ == 0; }

  // True on a stream's thread whose work should end: its device was lost, or the fake was reset.
  static bool GivenUp();
  static bool InCallback();

 private:
  struct Queued {
    Work work;
    std::shared_ptr<Completion> completion;
  };

  void Loop();
  CUresult Execute(Work& work);
  CUresult RunOpened(Work& work);
  void AddOrder(Work* work);

  Context* const context_;
  const unsigned flags_;
  const int priority_;
  const uint64_t number_;
  const uint64_t generation_;
  std::mt19937_64 random_;  // its thread only
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;          // guarded by mu_
  std::shared_ptr<Completion> last_;  // guarded by mu_
  bool closed_ = false;               // guarded by mu_
};

struct Event {
  unsigned flags = 0;
  Context* context = nullptr;
  std::mutex mu;
  std::shared_ptr<Completion> record;  // guarded by mu; null: never recorded
};

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_STREAM_H_
