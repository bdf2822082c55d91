#include "tests/fakes/cuda/stream.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "tests/fakes/cuda/errors.h"
#include "tests/fakes/cuda/runtime.h"

namespace zeroshard::fake_cuda {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(2);

struct ThreadState {
  bool is_stream = false;
  bool in_callback = false;
  int device = 0;
  uint64_t generation = 0;
};

thread_local ThreadState this_thread;

}  // namespace

void Completion::Finish(CUresult result) {
  std::lock_guard<std::mutex> lock(mu_);
  is_done_ = true;
  result_ = result;
  time_ = std::chrono::steady_clock::now();
  done_.notify_all();
}

bool Completion::Done() {
  std::lock_guard<std::mutex> lock(mu_);
  return is_done_;
}

CUresult Completion::Wait() {
  std::unique_lock<std::mutex> lock(mu_);
  done_.wait(lock, [this] { return is_done_; });
  return result_;
}

CUresult Completion::result() {
  std::lock_guard<std::mutex> lock(mu_);
  return result_;
}

Completion::Time Completion::time() {
  std::lock_guard<std::mutex> lock(mu_);
  return time_;
}

Stream::Stream(Context* context, unsigned flags, int priority, uint64_t number)
    : context_(context),
      flags_(flags),
      priority_(priority),
      number_(number),
      generation_(Runtime::Get().generation()),
      random_(Runtime::Get().settings().jitter.value_or(0) * 1000003 + number) {}

void Stream::Start() {
  std::thread([self = shared_from_this()] { self->Loop(); }).detach();
}

// The rule of the legacy default stream: it waits for all streams that did not opt out, and they
// wait for it. Held under the context's order_mu until the work is queued.
void Stream::AddOrder(Work* work) {
  if ((flags_ & CU_STREAM_NON_BLOCKING) != 0) return;
  if (!IsLegacy()) {
    if (context_->legacy == nullptr) return;
    std::shared_ptr<Completion> last = context_->legacy->Last();
    if (last != nullptr) work->after.push_back(std::move(last));
    return;
  }
  for (const std::weak_ptr<Stream>& weak : context_->streams) {
    const std::shared_ptr<Stream> other = weak.lock();
    if (other == nullptr || (other->flags() & CU_STREAM_NON_BLOCKING) != 0) continue;
    std::shared_ptr<Completion> last = other->Last();
    if (last != nullptr) work->after.push_back(std::move(last));
  }
}

std::shared_ptr<Completion> Stream::Enqueue(Work work) {
  std::lock_guard<std::mutex> order(context_->order_mu);
  AddOrder(&work);
  auto completion = std::make_shared<Completion>();
  std::lock_guard<std::mutex> lock(mu_);
  queue_.push_back({std::move(work), completion});
  last_ = completion;
  changed_.notify_all();
  return completion;
}

void Stream::Close() {
  std::lock_guard<std::mutex> lock(mu_);
  closed_ = true;
  changed_.notify_all();
}

std::shared_ptr<Completion> Stream::Last() {
  std::lock_guard<std::mutex> lock(mu_);
  return last_;
}

CUresult Stream::Synchronize() {
  const std::shared_ptr<Completion> last = Last();
  if (last != nullptr) last->Wait();
  return Runtime::Get().LostError(context_->device);
}

bool Stream::GivenUp() {
  Runtime& runtime = Runtime::Get();
  return this_thread.is_stream && (this_thread.generation != runtime.generation() ||
                                   runtime.LostError(this_thread.device) != CUDA_SUCCESS);
}

bool Stream::InCallback() { return this_thread.in_callback; }

void Stream::Loop() {
  this_thread = {true, false, context_->device, generation_};
  for (;;) {
    Queued next;
    {
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) break;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    const CUresult result = Execute(next.work);
    next.work = {};  // what it holds goes before those who wait see the end
    next.completion->Finish(result);
  }
  // A reset that finds this stream gone has seen all that it did.
  std::lock_guard<std::mutex> order(context_->order_mu);
}

CUresult Stream::Execute(Work& work) {
  Runtime& runtime = Runtime::Get();
  for (const std::shared_ptr<Completion>& other : work.after) {
    other->Wait();
  }
  if (work.counts && runtime.settings().jitter.has_value()) {
    const uint64_t dice = random_();
    if (dice % 2 == 1) {
      const uint64_t limit = dice / 2 % 32 == 0 ? 3000 : 300;
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % limit));
    }
  }
  CUresult result = runtime.LostError(context_->device);
  if (result == CUDA_SUCCESS && work.counts) {
    const OperationFate fate = runtime.CountOperation(context_->device);
    while (fate == OperationFate::kHangs && !GivenUp()) std::this_thread::sleep_for(kLookAgain);
    result = runtime.LostError(context_->device);
    if (result == CUDA_SUCCESS && generation_ != runtime.generation()) result = CUDA_ERROR_UNKNOWN;
  }
  if (result != CUDA_SUCCESS) {
    if (work.drop) work.drop();
    return result;
  }
  result = RunOpened(work);
  // Giving up because of a loss elsewhere is no loss of its own.
  if (result != CUDA_SUCCESS && generation_ == runtime.generation()) {
    runtime.Lose(context_->device, result);
  }
  return result;
}

CUresult Stream::RunOpened(Work& work) {
  if (!work.run) return CUDA_SUCCESS;
  MemoryMap& memory = Runtime::Get().memory();
  std::vector<Range> ranges = work.ranges;
  if (work.more_ranges) {
    for (Range& range : work.more_ranges()) ranges.push_back(std::move(range));
  }
  const std::optional<std::string> wrong = memory.Open(context_->device, ranges);
  if (wrong.has_value()) Die(std::string(work.name) + ": " + *wrong);
  this_thread.in_callback = work.is_callback;
  const CUresult result = work.run();
  this_thread.in_callback = false;
  memory.Close(ranges);
  return result;
}

}  // namespace zeroshard::fake_cuda
