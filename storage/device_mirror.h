// DeviceMirror: copies in host memory of what one worker of a job with a data plane holds, to which
// the job goes back when a GPU is lost; in the worker's region DEVICE_MIRROR.
//
// Two halves are written in turn, so that one of them is whole at any instant. A half counts once
// its `complete` word says so, which is written last; a kill in the middle leaves the other one.
// Checksums over all parts of a half find what memory has changed since.
// Format and protocol: docs/device.md. MirrorPlan is a pure value, the same for server and worker.
#ifndef ZEROSHARD_STORAGE_DEVICE_MIRROR_H_
#define ZEROSHARD_STORAGE_DEVICE_MIRROR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "storage/device_plan.h"
#include "storage/layout.h"
#include "storage/partition.h"

namespace zeroshard {

// What a mirror holds: the state that `attempt` committed as step `step`.
struct MirrorPoint {
  uint64_t attempt = 0;
  uint64_t step = 0;
  friend bool operator==(const MirrorPoint&, const MirrorPoint&) = default;
};

// What one checksum covers: the arrays of an image, or a piece of a shard of parameters.
struct MirrorPart {
  static constexpr uint32_t kNone = ~uint32_t{0};
  uint64_t offset = 0;  // within the half
  uint64_t bytes = 0;
  uint32_t unit = 0;
  uint32_t image = kNone;  // none: parameters
};
inline constexpr uint64_t kMirrorPieceBytes = uint64_t{16} << 20;  // of parameters, at most

// Where everything lies in a half; byte offsets within it.
class MirrorPlan {
 public:
  // Whether a job with this configuration has one.
  static bool Exists(const model::v1::EngineConfig& config) {
    return config.data_plane() && config.gpu_mirror_steps() > 0;
  }
  static MirrorPlan Create(const Layout& layout, const PartitionPlan& partition,
                           const DevicePlan& device, const model::v1::EngineConfig& config);

  uint64_t numbers() const;  // the job's numbers, as a record
  uint64_t numbers_capacity() const { return numbers_capacity_; }
  uint64_t checksums() const { return checksums_; }  // a u64 for each of the parts
  // In the order in which they lie there.
  std::span<const MirrorPart> parts() const { return parts_; }
  // The arrays of an image, as in a slot of the device.
  uint64_t image(uint32_t image) const { return images_[image]; }
  // This worker's shard of a unit's parameters.
  uint64_t parameters(uint32_t unit) const { return parameters_[unit]; }
  uint64_t half_bytes() const { return half_bytes_; }  // a multiple of 4096
  uint64_t bytes() const { return 2 * half_bytes_; }

 private:
  MirrorPlan() = default;

  uint64_t numbers_capacity_ = 0;
  uint64_t checksums_ = 0;
  std::vector<MirrorPart> parts_;
  std::vector<uint64_t> images_;
  std::vector<uint64_t> parameters_;
  uint64_t half_bytes_ = 0;
};

class DeviceMirror {
 public:
  struct Identity {
    uint64_t job_id = 0;
    uint64_t layout_fingerprint = 0;
    uint64_t plan_fingerprint = 0;  // DevicePlan's
    uint32_t worker = 0;
  };

  // `memory` is a whole region, aligned to 64 bytes, of an earlier process or zeroed. All must
  // outlive this. InvalidArgument for memory that is too small; halves of another job do not count.
  static absl::StatusOr<DeviceMirror> Open(std::span<std::byte> memory, const MirrorPlan& plan,
                                           const Identity& identity);

  std::optional<MirrorPoint> Newest() const;
  // The half of an attempt, if it is whole.
  std::optional<uint32_t> Find(uint64_t attempt) const;

  std::byte* half(uint32_t half) const { return memory_.data() + half * plan_->half_bytes(); }
  std::string_view numbers(uint32_t half) const;

  // The half that is to be written next, of which nothing counts from here on.
  uint32_t Begin();
  // Takes the checksum of a part that is written. Any thread, different parts at the same time.
  void Sum(uint32_t half, size_t part) const;
  // All of it is written and summed but for the numbers, which may be empty. ResourceExhausted when
  // they find no room.
  absl::Status Finish(uint32_t half, const MirrorPoint& point, std::string_view numbers);
  // Whether header, numbers and checksums of a half are what Finish made; DataLoss.
  absl::Status CheckHeader(uint32_t half) const;
  // Whether a part is what was summed. Any thread.
  bool IsIntact(uint32_t half, size_t part) const;
  // The half counts no longer.
  void Forget(uint32_t half) { header(half).complete.store(0, std::memory_order_release); }
  // A history that the job has left: halves of later attempts count no longer.
  void ForgetAfter(uint64_t attempt);
  // What was before a restore: halves of earlier attempts count no longer.
  void ForgetBefore(uint64_t attempt);

  // The points of the whole halves in a region of `bytes`, of any process; for the server.
  static std::vector<MirrorPoint> PointsIn(std::span<const std::byte> memory, uint64_t job_id);

 private:
  struct Header {
    uint64_t magic;
    uint32_t version, worker;
    uint64_t job_id, layout_fingerprint, plan_fingerprint;
    uint64_t step, attempt, numbers_bytes;
    uint64_t checksum;               // see HeaderSum
    std::atomic<uint64_t> complete;  // 1: the half is whole
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  DeviceMirror(std::span<std::byte> memory, const MirrorPlan& plan, const Identity& identity)
      : memory_(memory), plan_(&plan), identity_(identity) {}
  Header& header(uint32_t h) const { return *reinterpret_cast<Header*>(half(h)); }
  bool IsWhole(uint32_t half) const;
  uint64_t& checksum(uint32_t h, size_t part) const {
    return reinterpret_cast<uint64_t*>(half(h) + plan_->checksums())[part];
  }
  uint64_t HeaderSum(uint32_t half) const;

  std::span<std::byte> memory_;
  const MirrorPlan* plan_;
  Identity identity_;
};

// The states that all workers' mirrors hold, given the points of each.
std::vector<MirrorPoint> CommonPoints(std::span<const std::vector<MirrorPoint>> points);
// The newest of some; nothing when there is none.
std::optional<MirrorPoint> NewestOf(std::span<const MirrorPoint> points);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_DEVICE_MIRROR_H_
