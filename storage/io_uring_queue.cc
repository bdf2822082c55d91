#include "storage/io_uring_queue.h"

#include <liburing.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/io_transfer_table.h"

namespace zeroshard {
namespace {

constexpr uint32_t kCancelTag = UINT32_MAX;  // user data of a cancellation; others are slots

__kernel_timespec TimespecOf(absl::Duration duration) {
  const timespec time = absl::ToTimespec(duration);
  return {.tv_sec = time.tv_sec, .tv_nsec = time.tv_nsec};
}

class IoUringQueue final : public IoQueue {
 public:
  explicit IoUringQueue(const IoUringOptions& options)
      : table_(options.depth), cancelled_(options.depth) {}
  IoUringQueue(const IoUringQueue&) = delete;
  IoUringQueue& operator=(const IoUringQueue&) = delete;
  ~IoUringQueue() override;

  absl::Status Init(const IoUringOptions& options);

  absl::Status Submit(const IoTransfer& transfer) override;
  std::vector<IoCompletion> Wait(size_t min, const Deadline& deadline) override;
  std::vector<uint64_t> Close(const Deadline& deadline) override;
  size_t depth() const override { return table_.depth(); }
  size_t in_flight() const override { return table_.in_flight(); }
  std::string description() const override { return description_; }

 private:
  void RegisterBuffers(const std::vector<std::span<std::byte>>& buffers);
  std::optional<int> BufferOf(const TransferProgress& progress) const;

  io_uring_sqe* NextEntry(uint32_t tag);
  void Prepare(uint32_t slot);
  void Cancel(uint32_t slot);

  // Hand what is prepared to the kernel; the second also lets it post completions, the third also
  // waits for some.
  void Flush() { Entered(::io_uring_submit(&ring_)); }
  void Poll() { Entered(::io_uring_submit_and_get_events(&ring_)); }
  void WaitInKernel(size_t completions, const Deadline& deadline);
  void Entered(int result);
  void Break(const absl::Status& failure);

  void Reap();
  void CancelLate();

  IoTransferTable table_;
  std::vector<bool> cancelled_;  // by slot: its cancellation was asked for
  io_uring ring_ = {};
  bool open_ = false;              // ring_ is set up
  bool broken_ = false;            // the kernel refuses the system call
  std::deque<uint32_t> prepared_;  // tags of entries that the kernel has not taken
  std::vector<iovec> buffers_;     // registered
  std::string description_;
};

absl::Status IoUringQueue::Init(const IoUringOptions& options) {
  // A slot has at most its transfer and its cancellation among the entries.
  const unsigned entries = static_cast<unsigned>(2 * options.depth);
  struct Mode {
    unsigned flags;
    const char* name;
  };
  constexpr Mode kModes[] = {
      {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_SUBMIT_ALL,
       "single issuer, completions deferred"},
      {IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL, "cooperative completions"},
      {0, "plain"}};
  int result = -EINVAL;
  for (const Mode& mode : kModes) {
    io_uring_params params = {};
    params.flags = mode.flags;
    result = ::io_uring_queue_init_params(entries, &ring_, &params);
    if (result != -EINVAL) {
      description_ = absl::StrCat("io_uring (", mode.name, "), depth ", options.depth);
      break;
    }
  }
  if (result < 0) return ErrnoError(result, "io_uring_setup", "a ring");
  open_ = true;
  if (result = ::io_uring_ring_dontfork(&ring_); result < 0) {
    return ErrnoError(result, "madvise", "the memory of a ring");
  }
  if (!options.buffers.empty()) RegisterBuffers(options.buffers);
  return absl::OkStatus();
}

void IoUringQueue::RegisterBuffers(const std::vector<std::span<std::byte>>& buffers) {
  size_t bytes = 0;
  for (const std::span<std::byte> buffer : buffers) {
    buffers_.push_back({buffer.data(), buffer.size()});
    bytes += buffer.size();
  }
  const int result =
      ::io_uring_register_buffers(&ring_, buffers_.data(), static_cast<unsigned>(buffers_.size()));
  if (result == 0) {
    absl::StrAppend(&description_, ", ", buffers.size(), " buffers registered");
    return;
  }
  buffers_.clear();
  absl::StrAppend(&description_, ", no buffers registered (",
                  std::string(ErrnoError(result, "io_uring_register", "buffers").message()));
  rlimit limit = {};
  if (result == -ENOMEM && ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    absl::StrAppend(&description_, ": they need ", bytes, " bytes of locked memory, the limit is ",
                    limit.rlim_cur);
  }
  description_ += ")";
}

IoUringQueue::~IoUringQueue() {
  if (!open_) return;
  const std::vector<uint64_t> held = Close(Deadline::After(absl::InfiniteDuration()));
  ZS_CHECK(held.empty(), "an I/O queue that cannot wait was destroyed with transfers in flight");
}

absl::Status IoUringQueue::Submit(const IoTransfer& transfer) {
  const absl::StatusOr<uint32_t> slot = table_.Admit(transfer);
  if (!slot.ok()) return slot.status();
  cancelled_[*slot] = false;
  Prepare(*slot);
  if (!transfer.more) Flush();
  return absl::OkStatus();
}

std::vector<IoCompletion> IoUringQueue::Wait(size_t min, const Deadline& deadline) {
  if (!open_) return {};
  const size_t want = std::min(min, table_.completions() + table_.unreported());
  if (!broken_ && (want == 0 || deadline.Passed())) Poll();
  Reap();
  CancelLate();
  while (table_.completions() < want && !deadline.Passed()) {
    WaitInKernel(want - table_.completions(), deadline);
    Reap();
    CancelLate();
  }
  if (!prepared_.empty()) Flush();
  return table_.TakeCompletions();
}

std::vector<uint64_t> IoUringQueue::Close(const Deadline& deadline) {
  if (!open_) return {};
  table_.CloseForGood();
  if (!broken_) {
    for (const uint32_t slot : table_.SlotsInUse()) Cancel(slot);
    Poll();
    Reap();
  }
  while (table_.in_flight() > 0 && !broken_ && !deadline.Passed()) {
    WaitInKernel(1, deadline);
    Reap();
  }
  std::vector<uint64_t> held = table_.TagsInUse();
  ::io_uring_queue_exit(&ring_);
  open_ = false;
  return held;
}

std::optional<int> IoUringQueue::BufferOf(const TransferProgress& progress) const {
  const std::byte* begin = progress.memory();
  const std::byte* end = begin + progress.bytes();
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const auto* base = static_cast<const std::byte*>(buffers_[i].iov_base);
    if (begin >= base && end <= base + buffers_[i].iov_len) return static_cast<int>(i);
  }
  return std::nullopt;
}

io_uring_sqe* IoUringQueue::NextEntry(uint32_t tag) {
  io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
  ZS_CHECK(entry != nullptr, "a ring has room for all slots");
  prepared_.push_back(tag);
  return entry;
}

void IoUringQueue::Prepare(uint32_t slot) {
  const TransferProgress& progress = table_.progress(slot);
  const IoTransfer& transfer = progress.transfer();
  io_uring_sqe* entry = NextEntry(slot);
  const unsigned bytes = static_cast<unsigned>(progress.bytes());
  const std::optional<int> buffer = BufferOf(progress);
  switch (transfer.operation) {
    case IoOperation::kRead:
      if (buffer.has_value()) {
        ::io_uring_prep_read_fixed(entry, transfer.fd, progress.memory(), bytes, progress.offset(),
                                   *buffer);
      } else {
        ::io_uring_prep_read(entry, transfer.fd, progress.memory(), bytes, progress.offset());
      }
      break;
    case IoOperation::kWrite:
      if (buffer.has_value()) {
        ::io_uring_prep_write_fixed(entry, transfer.fd, progress.memory(), bytes, progress.offset(),
                                    *buffer);
      } else {
        ::io_uring_prep_write(entry, transfer.fd, progress.memory(), bytes, progress.offset());
      }
      break;
    case IoOperation::kSync:
      ::io_uring_prep_fsync(entry, transfer.fd, IORING_FSYNC_DATASYNC);
      break;
  }
  ::io_uring_sqe_set_data64(entry, slot);
}

void IoUringQueue::Cancel(uint32_t slot) {
  if (cancelled_[slot]) return;
  cancelled_[slot] = true;
  io_uring_sqe* entry = NextEntry(kCancelTag);
  ::io_uring_prep_cancel64(entry, slot, 0);
  ::io_uring_sqe_set_data64(entry, kCancelTag);
}

void IoUringQueue::WaitInKernel(size_t completions, const Deadline& deadline) {
  const absl::Duration left = std::min(deadline.Remaining(), table_.NextDeadline().Remaining());
  const bool forever = left == absl::InfiniteDuration();
  __kernel_timespec timeout = TimespecOf(forever ? absl::ZeroDuration() : left);
  io_uring_cqe* first = nullptr;
  Entered(::io_uring_submit_and_wait_timeout(&ring_, &first, static_cast<unsigned>(completions),
                                             forever ? nullptr : &timeout, nullptr));
}

void IoUringQueue::Entered(int result) {
  while (prepared_.size() > ::io_uring_sq_ready(&ring_)) prepared_.pop_front();
  if (result >= 0 || result == -EINTR || result == -ETIME) return;
  if (result == -EAGAIN || result == -EBUSY) {
    ::poll(nullptr, 0, 1);  // out of requests or completions: the kernel asks to come again
    return;
  }
  Break(ErrnoError(result, "io_uring_enter", "the I/O queue"));
}

// What the kernel has not taken it will never touch; of the rest nothing can be learned any more.
void IoUringQueue::Break(const absl::Status& failure) {
  broken_ = true;
  for (const uint32_t tag : std::exchange(prepared_, {})) {
    if (tag != kCancelTag) table_.Finish(tag, failure);
  }
  table_.FailAll(failure);
}

void IoUringQueue::Reap() {
  if (broken_) return;
  io_uring_cqe* batch[64];
  while (const unsigned count = ::io_uring_peek_batch_cqe(&ring_, batch, std::size(batch))) {
    for (unsigned i = 0; i < count; ++i) {
      const uint64_t tag = ::io_uring_cqe_get_data64(batch[i]);
      if (tag == kCancelTag) continue;
      const uint32_t slot = static_cast<uint32_t>(tag);
      if (table_.Advance(slot, batch[i]->res)) Prepare(slot);
    }
    ::io_uring_cq_advance(&ring_, count);
  }
}

void IoUringQueue::CancelLate() {
  for (const uint32_t slot : table_.Expire()) {
    if (!broken_) Cancel(slot);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoUringQueue(const IoUringOptions& options) {
  if (options.depth < 1 || options.depth > kMaxIoDepth) {
    return absl::InvalidArgumentError(
        absl::StrCat("an I/O queue of depth ", options.depth, "; 1 to ", kMaxIoDepth));
  }
  auto queue = std::make_unique<IoUringQueue>(options);
  ZS_RETURN_IF_ERROR(queue->Init(options));
  return queue;
}

}  // namespace zeroshard
