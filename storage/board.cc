#include "storage/board.h"

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr uint64_t kLine = 64;

uint64_t Align(uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

uint64_t DirtyWords(const BoardShape& shape) { return (uint64_t{shape.units} + 63) / 64; }

// Hands out parts of the board one after another; with null memory it only counts.
class Cursor {
 public:
  explicit Cursor(std::byte* memory) : memory_(memory) {}

  template <typename T>
  T* Take(uint64_t count) {
    T* result = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + offset_);
    offset_ += Align(count * sizeof(T));
    return result;
  }
  uint64_t offset() const { return offset_; }

 private:
  std::byte* memory_;
  uint64_t offset_ = 0;
};

absl::Status Check(std::span<std::byte> memory, const BoardShape& shape) {
  if (memory.size() < Board::Bytes(shape)) {
    return absl::InvalidArgumentError(
        absl::StrCat("board of ", memory.size(), " bytes, need ", Board::Bytes(shape)));
  }
  return absl::OkStatus();
}

}  // namespace

// Both Bytes and the constructor walk the parts in this order.
template <typename Visit>
static void VisitParts(const BoardShape& shape, Visit&& visit) {
  const uint64_t w = shape.workers, r = shape.ranks, u = shape.units, p = shape.parameters;
  visit.template operator()<BoardHeader>(1);
  visit.template operator()<RankSlot>(r);
  visit.template operator()<WorkerSlot>(w);
  visit.template operator()<Contribution>(u * r);
  visit.template operator()<MergeRecord>(w * u);
  visit.template operator()<MergeRecord>(r * u);
  visit.template operator()<std::atomic<uint64_t>>(w * r);
  visit.template operator()<std::atomic<uint64_t>>(w * u);
  visit.template operator()<std::atomic<uint64_t>>(u);
  visit.template operator()<std::atomic<uint64_t>>(w * DirtyWords(shape));
  visit.template operator()<std::atomic<uint64_t>>(p);
  visit.template operator()<std::atomic<uint64_t>>(u);
  visit.template operator()<std::atomic<uint32_t>>(w * u);
  visit.template operator()<std::atomic<uint64_t>>(r * u);
  visit.template operator()<std::atomic<uint32_t>>(u);
}

uint64_t Board::Bytes(const BoardShape& shape) {
  Cursor cursor(nullptr);
  VisitParts(shape, [&]<typename T>(uint64_t count) { cursor.Take<T>(count); });
  return (cursor.offset() + 4095) / 4096 * 4096;
}

Board::Board(std::span<std::byte> memory, const BoardShape& shape)
    : shape_(shape), dirty_words_(DirtyWords(shape)) {
  Cursor cursor(memory.data());
  std::array<std::byte*, 15> parts;
  size_t next = 0;
  VisitParts(shape, [&]<typename T>(uint64_t count) {
    parts[next++] = reinterpret_cast<std::byte*>(cursor.Take<T>(count));
  });
  header_ = reinterpret_cast<BoardHeader*>(parts[0]);
  ranks_ = reinterpret_cast<RankSlot*>(parts[1]);
  workers_ = reinterpret_cast<WorkerSlot*>(parts[2]);
  contributions_ = reinterpret_cast<Contribution*>(parts[3]);
  merged_ = reinterpret_cast<MergeRecord*>(parts[4]);
  local_ = reinterpret_cast<MergeRecord*>(parts[5]);
  put_done_ = reinterpret_cast<std::atomic<uint64_t>*>(parts[6]);
  fill_ = reinterpret_cast<std::atomic<uint64_t>*>(parts[7]);
  wanted_ = reinterpret_cast<std::atomic<uint64_t>*>(parts[8]);
  dirty_ = reinterpret_cast<std::atomic<uint64_t>*>(parts[9]);
  update_counts_ = reinterpret_cast<std::atomic<uint64_t>*>(parts[10]);
  common_counts_ = reinterpret_cast<std::atomic<uint64_t>*>(parts[11]);
  initialized_ = reinterpret_cast<std::atomic<uint32_t>*>(parts[12]);
  pins_ = reinterpret_cast<std::atomic<uint64_t>*>(parts[13]);
  evicting_ = reinterpret_cast<std::atomic<uint32_t>*>(parts[14]);
}

absl::StatusOr<Board> Board::Format(std::span<std::byte> memory, const BoardShape& shape,
                                    uint64_t job_id, uint64_t layout_fingerprint, double loss_scale,
                                    uint32_t hysteresis) {
  if (absl::Status status = Check(memory, shape); !status.ok()) return status;
  Board board(memory, shape);
  BoardHeader& header = board.header();
  header.version = kBoardVersion;
  header.job_id = job_id;
  header.layout_fingerprint = layout_fingerprint;
  header.shape = shape;
  header.numbers[0].loss_scale = loss_scale;
  header.numbers[0].scaler_last_overflow = -1;
  header.numbers[0].scaler_hysteresis = hysteresis;
  header.epoch.store(1, std::memory_order_relaxed);
  header.attempt.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  header.magic = kBoardMagic;
  return board;
}

absl::StatusOr<Board> Board::Adopt(std::span<std::byte> memory, const BoardShape& shape,
                                   uint64_t job_id, uint64_t layout_fingerprint) {
  if (absl::Status status = Check(memory, shape); !status.ok()) return status;
  Board board(memory, shape);
  const BoardHeader& header = board.header();
  if (header.magic != kBoardMagic || header.version != kBoardVersion || header.job_id != job_id ||
      header.layout_fingerprint != layout_fingerprint || header.shape != shape) {
    return absl::DataLossError("the board does not belong to this job, layout or version");
  }
  return board;
}

uint64_t UserStates::Bytes(uint32_t ranks, uint64_t capacity) {
  const uint64_t bytes = uint64_t{ranks} * 2 * (kLine + Align(capacity));
  return (bytes + 4095) / 4096 * 4096;
}

UserStates::Area* UserStates::area(uint32_t rank, uint32_t index) const {
  const uint64_t stride = kLine + Align(capacity_);
  return reinterpret_cast<Area*>(memory_.data() + (uint64_t{rank} * 2 + index) * stride);
}

absl::Status UserStates::Write(uint32_t rank, uint64_t attempt, uint64_t committed,
                               std::span<const std::byte> bytes) const {
  if (bytes.size() > capacity_) {
    return absl::InvalidArgumentError(absl::StrCat("user_state of ", bytes.size(),
                                                   " bytes; the job was created with room for ",
                                                   capacity_, " (zeroshard.user_state_bytes)"));
  }
  Area* target = area(rank, 0);
  if (committed != 0 && target->attempt.load(std::memory_order_acquire) == committed) {
    target = area(rank, 1);
  }
  target->attempt.store(0, std::memory_order_release);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(target) + kLine);
  target->bytes = bytes.size();
  target->attempt.store(attempt, std::memory_order_release);
  return absl::OkStatus();
}

std::span<const std::byte> UserStates::Read(uint32_t rank, uint64_t committed) const {
  if (committed == 0) return {};
  for (uint32_t index = 0; index < 2; ++index) {
    const Area* candidate = area(rank, index);
    if (candidate->attempt.load(std::memory_order_acquire) != committed) continue;
    if (candidate->bytes > capacity_) return {};
    return {reinterpret_cast<const std::byte*>(candidate) + kLine, candidate->bytes};
  }
  return {};
}

}  // namespace zeroshard
