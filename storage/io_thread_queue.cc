#include "storage/io_thread_queue.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "storage/io_transfer_table.h"

namespace zeroshard {
namespace {

int64_t CallOnce(const TransferProgress& progress) {
  const IoTransfer& transfer = progress.transfer();
  const off_t offset = static_cast<off_t>(progress.offset());
  int64_t result = 0;
  switch (transfer.operation) {
    case IoOperation::kRead:
      result = ::pread(transfer.fd, progress.memory(), progress.bytes(), offset);
      break;
    case IoOperation::kWrite:
      result = ::pwrite(transfer.fd, progress.memory(), progress.bytes(), offset);
      break;
    case IoOperation::kSync:
      result = ::fdatasync(transfer.fd);
      break;
  }
  return result < 0 ? -errno : result;
}

absl::Status Run(const IoTransfer& transfer, const std::atomic<bool>& stopping) {
  TransferProgress progress(transfer);
  while (!stopping.load()) {
    if (const auto status = progress.Advance(CallOnce(progress)); status.has_value()) {
      return *status;
    }
  }
  return absl::CancelledError();
}

// What the queue and its threads share; outlives the queue while a thread is stuck.
class Exchange {
 public:
  void Add(uint32_t slot, const IoTransfer& transfer) {
    absl::MutexLock lock(&mu_);
    jobs_.push_back({slot, transfer});
    work_.Signal();
  }

  // True when the transfer was not begun, and will not be.
  bool Withdraw(uint32_t slot) {
    absl::MutexLock lock(&mu_);
    return std::erase_if(jobs_, [slot](const Job& job) { return job.slot == slot; }) > 0;
  }

  // Ends the threads once the call they are in returns; jobs that were not begun are not.
  void Stop() {
    absl::MutexLock lock(&mu_);
    stopping_.store(true);
    work_.SignalAll();
  }

  struct Result {
    uint32_t slot;
    absl::Status status;
  };

  // Waits until there is a result or `timeout` has passed.
  std::vector<Result> Take(absl::Duration timeout) {
    absl::MutexLock lock(&mu_);
    const Deadline deadline = Deadline::After(timeout);
    while (results_.empty() && !deadline.Passed()) {
      done_.WaitWithTimeout(&mu_, deadline.Remaining());
    }
    return std::exchange(results_, {});
  }

  // A thread's life.
  void Serve() {
    absl::MutexLock lock(&mu_);
    while (true) {
      while (jobs_.empty() && !stopping_.load()) work_.Wait(&mu_);
      if (stopping_.load()) return;
      const Job job = jobs_.front();
      jobs_.pop_front();
      mu_.Unlock();
      absl::Status status = Run(job.transfer, stopping_);
      mu_.Lock();
      results_.push_back({job.slot, std::move(status)});
      done_.Signal();
    }
  }

 private:
  struct Job {
    uint32_t slot;
    IoTransfer transfer;
  };

  absl::Mutex mu_;
  absl::CondVar work_;
  absl::CondVar done_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mu_);
  std::vector<Result> results_ ABSL_GUARDED_BY(mu_);
  std::atomic<bool> stopping_{false};  // set under mu_
};

class IoThreadQueue final : public IoQueue {
 public:
  explicit IoThreadQueue(size_t depth) : table_(depth), exchange_(std::make_shared<Exchange>()) {}
  IoThreadQueue(const IoThreadQueue&) = delete;
  IoThreadQueue& operator=(const IoThreadQueue&) = delete;
  ~IoThreadQueue() override { (void)Close(Deadline::After(absl::InfiniteDuration())); }

  absl::Status Start(size_t threads);

  absl::Status Submit(const IoTransfer& transfer) override;
  std::vector<IoCompletion> Wait(size_t min, const Deadline& deadline) override;
  std::vector<uint64_t> Close(const Deadline& deadline) override;
  size_t depth() const override { return table_.depth(); }
  size_t in_flight() const override { return table_.in_flight(); }
  std::string description() const override {
    return absl::StrCat(thread_count_, " threads, depth ", depth());
  }

 private:
  void TakeResults(const Deadline& deadline);
  void CancelLate();

  IoTransferTable table_;
  size_t thread_count_ = 0;
  const std::shared_ptr<Exchange> exchange_;
  std::vector<std::thread> threads_;
  bool closed_ = false;
};

absl::Status IoThreadQueue::Start(size_t threads) {
  // The program's own threads take its signals.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  absl::Status status;
  try {
    while (threads_.size() < threads) {
      threads_.emplace_back([exchange = exchange_] { exchange->Serve(); });
    }
  } catch (const std::system_error& error) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("thread ", threads_.size() + 1, " of ", threads, " for I/O: ", error.what()));
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  thread_count_ = threads_.size();
  return status;
}

absl::Status IoThreadQueue::Submit(const IoTransfer& transfer) {
  const absl::StatusOr<uint32_t> slot = table_.Admit(transfer);
  if (!slot.ok()) return slot.status();
  exchange_->Add(*slot, transfer);
  return absl::OkStatus();
}

std::vector<IoCompletion> IoThreadQueue::Wait(size_t min, const Deadline& deadline) {
  if (closed_) return {};
  const size_t want = std::min(min, table_.completions() + table_.unreported());
  TakeResults(Deadline::After(absl::ZeroDuration()));
  CancelLate();
  while (table_.completions() < want && !deadline.Passed()) {
    TakeResults(deadline);
    CancelLate();
  }
  return table_.TakeCompletions();
}

std::vector<uint64_t> IoThreadQueue::Close(const Deadline& deadline) {
  if (std::exchange(closed_, true)) return {};
  table_.CloseForGood();
  for (const uint32_t slot : table_.SlotsInUse()) {
    if (exchange_->Withdraw(slot)) table_.Finish(slot, absl::CancelledError());
  }
  exchange_->Stop();
  while (table_.in_flight() > 0 && !deadline.Passed()) TakeResults(deadline);
  const bool stuck = table_.in_flight() > 0;
  for (std::thread& thread : threads_) stuck ? thread.detach() : thread.join();
  return table_.TagsInUse();
}

void IoThreadQueue::TakeResults(const Deadline& deadline) {
  const absl::Duration left = std::min(deadline.Remaining(), table_.NextDeadline().Remaining());
  for (const Exchange::Result& result : exchange_->Take(left)) {
    table_.Finish(result.slot, result.status);
  }
}

void IoThreadQueue::CancelLate() {
  for (const uint32_t slot : table_.Expire()) {
    if (exchange_->Withdraw(slot)) table_.Finish(slot, absl::CancelledError());
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoThreadQueue(const IoThreadOptions& options) {
  if (options.depth < 1 || options.depth > kMaxIoDepth || options.threads < 1) {
    return absl::InvalidArgumentError(absl::StrCat("an I/O queue of depth ", options.depth, " and ",
                                                   options.threads, " threads; depth is 1 to ",
                                                   kMaxIoDepth, ", threads at least 1"));
  }
  auto queue = std::make_unique<IoThreadQueue>(options.depth);
  const absl::Status started = queue->Start(std::min(options.threads, options.depth));
  if (!started.ok()) return started;
  return queue;
}

}  // namespace zeroshard
