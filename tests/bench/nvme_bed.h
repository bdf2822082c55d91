// What benchmarks of the NVMe tier stand on: a directory on a real drive, a worker's tier in it,
// and a second file of the same layout, in which others move the same bytes.
#ifndef ZEROSHARD_TESTS_BENCH_NVME_BED_H_
#define ZEROSHARD_TESTS_BENCH_NVME_BED_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "device/cpu/thread_pool.h"
#include "storage/aligned_buffer.h"
#include "storage/layout.h"
#include "storage/nvme_plan.h"
#include "worker/nvme_tier.h"
#include "worker/tier_mover.h"

namespace zeroshard::bench {

// A fresh directory beneath $ZEROSHARD_BENCH_NVME_DIR, or beneath the working directory; removed
// with all that is in it.
class DriveDirectory {
 public:
  // FailedPrecondition where O_DIRECT or the drive is missing.
  static absl::StatusOr<std::unique_ptr<DriveDirectory>> Make();
  DriveDirectory(const DriveDirectory&) = delete;
  DriveDirectory& operator=(const DriveDirectory&) = delete;
  ~DriveDirectory();

  const std::string& path() const { return path_; }

 private:
  explicit DriveDirectory(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

struct NvmeBedShape {
  uint64_t elements = 0;    // of the job's only unit, bf16; a multiple of the chunk
  bool parameters = false;  // they are what lies on the tier, instead of AdamW's fp32 states
  int lanes = 2;
};

inline constexpr uint64_t kBedChunk = uint64_t{64} << 10;  // elements

// Seconds of the clock and of processors.
struct Spent {
  double wall = 0;
  double cpu = 0;
};

// Of this process, all threads and the kernel's own for it.
double ProcessCpuSeconds();

template <typename Work>
Spent Measure(const Work& work) {
  const absl::Time start = absl::Now();
  const double before = ProcessCpuSeconds();
  work();
  const double cpu = ProcessCpuSeconds() - before;
  return {absl::ToDoubleSeconds(absl::Now() - start), cpu};
}

// Settings are a job's defaults: blocks of 1 MiB (an image is one), depth 8 in each direction and
// 16 together, 32 staging buffers (40 of parameters), checksums on. One thread at a time. A failure
// ends the process.
class NvmeBed {
 public:
  NvmeBed(const DriveDirectory& directory, const NvmeBedShape& shape);
  NvmeBed(const NvmeBed&) = delete;
  NvmeBed& operator=(const NvmeBed&) = delete;

  const NvmePlan& plan() const { return *plan_; }
  NvmeTier& tier() { return *tier_; }
  ThreadPool& pool() { return *pool_; }
  uint32_t depth() const { return options_.config.queue_depth(); }
  uint32_t images() const { return images_; }  // all of one size, numbered from first()
  uint32_t first() const { return first_; }
  uint64_t image_bytes() const { return plan_->shape(first_).image_bytes(); }
  uint64_t pass_bytes() const { return images_ * image_bytes(); }  // in one direction
  uint32_t staging_buffers() const { return mover_->buffers(); }

  // The second file: as long as the tier's, preallocated and written like it.
  const std::string& file() const { return file_; }
  // Of the slots that the next pass over the second file reads, and of those that it writes: the
  // first of each kind, every other slot from there on. They change places with each call.
  struct Slots {
    uint64_t read = 0;
    uint64_t write = 0;
  };
  Slots NextSlots();

  // The transfers of one pass over all images in the second file, with the queue, the depth and as
  // many buffers as the tier has, and nothing else: no checksums, no table, no work.
  void Transfer(bool write);

 private:
  void MakeFile();

  NvmeBedShape shape_;
  std::optional<Layout> layout_;
  std::optional<NvmePlan> plan_;
  std::unique_ptr<ThreadPool> pool_;
  std::optional<AlignedBuffer> table_;
  NvmeTierOptions options_;
  std::unique_ptr<NvmeTier> tier_;
  uint32_t first_ = 0;
  uint32_t images_ = 0;
  std::string file_;
  UniqueFd fd_;
  std::unique_ptr<TierMover> mover_;
  bool swapped_ = false;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_NVME_BED_H_
