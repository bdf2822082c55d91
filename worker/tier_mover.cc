#include "worker/tier_mover.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/deadline.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// A piece of memory that is registered at once may not be larger.
constexpr uint64_t kMaxMemory = uint64_t{1} << 30;
constexpr absl::Duration kSlice = absl::Milliseconds(50);

int DirectionOf(const TierMove& move) { return move.operation == IoOperation::kWrite ? 1 : 0; }

}  // namespace

uint32_t TierMover::StagingImages(const NvmePlan& plan, const NvmeTierOptions& options) {
  uint64_t images = 0;
  for (const NvmeImage& image : plan.images()) images += image.elements > 0 ? 1 : 0;
  const uint64_t lanes = options.pool == nullptr ? 1 : options.pool->lanes();
  const uint64_t wanted = uint64_t{options.config.buffer_count()} * options.config.queue_depth();
  return static_cast<uint32_t>(std::min(images, std::max(wanted, 2 * lanes + 2)));
}

TierMover::TierMover(const NvmePlan& plan, const NvmeTierOptions& options, std::vector<int> fds)
    : options_(options),
      fds_(std::move(fds)),
      stride_(plan.max_image_bytes()),
      buffer_count_(StagingImages(plan, options)),
      buffers_per_memory_(static_cast<uint32_t>(std::max<uint64_t>(1, kMaxMemory / stride_))),
      paths_(fds_.size()),
      counters_(fds_.size()) {}

absl::Status TierMover::Prepare() {
  for (uint32_t done = static_cast<uint32_t>(memory_.size()) * buffers_per_memory_;
       done < buffer_count_; done += buffers_per_memory_) {
    const uint64_t count = std::min(buffers_per_memory_, buffer_count_ - done);
    ZS_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Make(count * stride_));
    ZS_RETURN_IF_ERROR(options_.pin(memory.bytes()));
    memory_.push_back(std::move(memory));
  }
  if (queue_ != nullptr) return absl::OkStatus();
  const size_t depth = size_t{2} * options_.config.queue_depth();
  IoQueueOptions options{.depth = depth, .threads = options_.config.threads()};
  for (const AlignedBuffer& memory : memory_) options.buffers.push_back(memory.bytes());
  ZS_ASSIGN_OR_RETURN(queue_, options_.make_queue(options_.backend, options));
  return absl::OkStatus();
}

std::byte* TierMover::buffer(uint32_t index) const {
  return memory_[index / buffers_per_memory_].data() + index % buffers_per_memory_ * stride_;
}

void TierMover::Start(TierMove* move) {
  move->status = absl::OkStatus();
  move->submitted = 0;
  paths_[move->path].waiting[DirectionOf(*move)].push_back(move);
}

std::vector<TierMove*> TierMover::Turn(absl::Duration wait) {
  Begin();
  // Parts of moves that have ended made room, too.
  for (bool some = Reap(ended_.empty() ? wait : absl::ZeroDuration()); some && ended_.empty();) {
    Begin();
    some = Reap(absl::ZeroDuration());
  }
  return std::exchange(ended_, {});
}

std::vector<TierMove*> TierMover::Withdraw() {
  std::vector<TierMove*> taken;
  for (uint32_t p = 0; p < paths_.size(); ++p) {
    for (std::deque<TierMove*>& waiting : paths_[p].waiting) {
      if (waiting.empty()) continue;
      if (options_.gate != nullptr) options_.gate->Withdraw(p, waiting.front()->operation);
      const bool begun = waiting.front()->submitted > 0;
      taken.insert(taken.end(), waiting.begin() + (begun ? 1 : 0), waiting.end());
      waiting.erase(waiting.begin() + (begun ? 1 : 0), waiting.end());
    }
  }
  return taken;
}

void TierMover::Begin() {
  gate_wait_ = absl::InfiniteDuration();
  const auto count = static_cast<uint32_t>(paths_.size());
  for (bool progress = true; progress;) {
    progress = false;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t path = (next_path_ + i) % count;
      const int first = in_flight_[0] > in_flight_[1] ? 1 : 0;
      for (const int direction : {first, 1 - first}) progress |= BeginOne(path, direction);
    }
  }
  next_path_ = (next_path_ + 1) % count;
}

bool TierMover::BeginOne(uint32_t path, int direction) {
  std::deque<TierMove*>& waiting = paths_[path].waiting[direction];
  if (waiting.empty()) return false;
  TierMove* move = waiting.front();
  if (!move->status.ok() || failed()) {
    // Nothing more is begun of a move of which a part has failed.
    if (move->status.ok()) move->status = failure_;
    move->submitted = move->bytes;
    waiting.pop_front();
    if (move->in_flight == 0) End(move);
    return true;
  }
  if (in_flight_[0] + in_flight_[1] == 2 * options_.config.queue_depth()) return false;
  const uint64_t bytes = std::min(options_.config.block_bytes(), move->bytes - move->submitted);
  if (options_.gate != nullptr) {
    const absl::Duration later = options_.gate->TryStart(path, move->operation, bytes);
    if (later > absl::ZeroDuration()) {
      gate_wait_ = std::min(gate_wait_, later);
      return false;
    }
  }
  const absl::Status status = Submit(move, bytes);
  if (!status.ok()) {
    if (options_.gate != nullptr) options_.gate->Done(path);
    KeepFirstError(failure_, status);
    move->status = status;
    return true;
  }
  if (move->submitted == move->bytes) waiting.pop_front();
  return true;
}

absl::Status TierMover::Submit(TierMove* move, uint64_t bytes) {
  // A drive that has nothing to do gets two transfers before the others are handed over: the kernel
  // takes some microseconds for each.
  const bool drive_waits = in_flight_[0] + in_flight_[1] == 1;
  ZS_RETURN_IF_ERROR(queue_->Submit({.operation = move->operation,
                                     .fd = fds_[move->path],
                                     .memory = move->memory + move->submitted,
                                     .bytes = bytes,
                                     .offset = move->offset + move->submitted,
                                     .tag = reinterpret_cast<uint64_t>(move),
                                     .deadline = Deadline::After(options_.io_timeout),
                                     .more = !options_.config.single_submit() && !drive_waits}));
  move->submitted += bytes;
  ++move->in_flight;
  ++in_flight_[DirectionOf(*move)];
  Path& path = paths_[move->path];
  if (path.in_flight++ == 0) path.busy_since = SystemClock().Elapsed();
  return absl::OkStatus();
}

bool TierMover::Reap(absl::Duration wait) {
  const uint32_t in_flight = in_flight_[0] + in_flight_[1];
  wait = std::min(wait, gate_wait_);
  if (in_flight == 0) {
    if (wait > absl::ZeroDuration() && wait < absl::InfiniteDuration()) absl::SleepFor(wait);
    return false;
  }
  size_t min = wait > absl::ZeroDuration() ? 1 : 0;
  // Completions are waited for in groups, so that there are fewer wakes.
  if (min > 0 && !options_.config.overlap_events()) {
    min = std::max<size_t>(1, std::max(in_flight_[0], in_flight_[1]) / 2);
  }
  const std::vector<IoCompletion> completions = queue_->Wait(min, Deadline::After(wait));
  for (const IoCompletion& done : completions) {
    OnCompletion(reinterpret_cast<TierMove*>(done.tag), done.status);
  }
  return !completions.empty();
}

void TierMover::OnCompletion(TierMove* move, const absl::Status& status) {
  Path& path = paths_[move->path];
  --move->in_flight;
  --in_flight_[DirectionOf(*move)];
  if (--path.in_flight == 0)
    counters_[move->path].busy += SystemClock().Elapsed() - path.busy_since;
  if (options_.gate != nullptr) options_.gate->Done(move->path);
  if (absl::IsDeadlineExceeded(status)) KeepFirstError(failure_, status);
  if (!status.ok()) {
    ++counters_[move->path].errors;
    KeepFirstError(move->status, status);
  }
  if (move->submitted == move->bytes && move->in_flight == 0) End(move);
}

void TierMover::End(TierMove* move) {
  TierPathCounters& counters = counters_[move->path];
  if (move->status.ok()) {
    (DirectionOf(*move) == 0 ? counters.read_bytes : counters.written_bytes) += move->bytes;
  }
  ended_.push_back(move);
}

absl::Status TierMover::Sync() {
  ZS_RETURN_IF_ERROR(Prepare());
  absl::Status first;
  size_t next = 0;
  size_t waiting = 0;
  while (next < fds_.size() || waiting > 0) {
    while (next < fds_.size() && waiting < queue_->depth()) {
      const absl::Status status =
          queue_->Submit({.operation = IoOperation::kSync,
                          .fd = fds_[next++],
                          .deadline = Deadline::After(options_.io_timeout)});
      KeepFirstError(first, status);
      if (status.ok()) ++waiting;
    }
    for (const IoCompletion& done : queue_->Wait(1, Deadline::After(kSlice))) {
      --waiting;
      KeepFirstError(first, done.status);
    }
    options_.beat();
  }
  KeepFirstError(failure_, first);
  return first;
}

void TierMover::Settle() {
  if (queue_ == nullptr) return;
  const Deadline deadline = Deadline::After(options_.settle_time);
  while (queue_->in_flight() > 0 && !deadline.Passed()) {
    static_cast<void>(queue_->Wait(0, Deadline::After(absl::ZeroDuration())));
    if (queue_->in_flight() > 0) absl::SleepFor(absl::Milliseconds(10));
    options_.beat();
  }
  if (!queue_->Close(Deadline::After(kSlice)).empty()) {
    for (AlignedBuffer& memory : memory_) std::move(memory).Abandon();
    memory_.clear();
    held_ = true;
  }
  queue_.reset();
  failure_ = absl::OkStatus();
}

std::string TierMover::description() const {
  return absl::StrCat(queue_ == nullptr ? "no queue" : queue_->description(), ", ", buffer_count_,
                      " buffers of ", stride_, " bytes");
}

}  // namespace zeroshard
