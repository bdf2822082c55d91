// NvmePlan: what of one worker's partition can rest on the NVMe tier, as images, and where each one
// lies.
//
// A pure value, computed from layout, partition plan, configuration and the weights of the paths by
// the server and by the worker alike; immutable, any thread may read it. Format page: docs/nvme.md.
//
// Images 0 to chunks() - 1 are the states of the partition's chunks, by their numbers (none of them
// has room when the states are never on this tier). After them come the parameter images of units
// whose shards rest there, in runs of at most the partition's chunk size.
#ifndef ZEROSHARD_STORAGE_NVME_PLAN_H_
#define ZEROSHARD_STORAGE_NVME_PLAN_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "storage/chunk_arrays.h"
#include "storage/chunk_image.h"
#include "storage/extent_plan.h"
#include "storage/layout.h"
#include "storage/partition.h"
#include "storage/slot_table.h"

namespace zeroshard {

inline constexpr uint32_t kNoImage = ~uint32_t{0};

// One image: a run of whole grains of one unit.
struct NvmeImage {
  uint32_t unit = 0;
  uint64_t begin = 0;     // first element within the unit
  uint64_t elements = 0;  // 0: nothing of it is ever on the tier
  bool parameters = false;
  bool home = false;  // rests on the tier unless somebody moves it
  // Where its arrays lie in the partition region while it is on the host.
  std::vector<PartitionArray> arrays = {};
};

class NvmePlan {
 public:
  // Whether a job with this configuration has a plan.
  static bool Exists(const model::v1::EngineConfig& config) {
    if (config.data_plane()) return HasStates(config) || HasNvmeParameters(config);
    return config.tiered() || config.parameter_tier() == model::v1::TIER_NVME;
  }

  // Whether states of such a job can be on the tier; on GPUs they are there from the start or
  // never.
  static bool HasStates(const model::v1::EngineConfig& config) {
    return config.tiered() &&
           (!config.data_plane() || config.optimizer_tier() == model::v1::TIER_NVME);
  }

  // `weights`: of each path. InvalidArgument as ExtentPlan. Where there is nothing that could be on
  // the tier the plan has one image without elements.
  static absl::StatusOr<NvmePlan> Create(const Layout& layout, const PartitionPlan& partition,
                                         const model::v1::EngineConfig& config,
                                         std::span<const uint64_t> weights);

  uint32_t chunks() const { return chunks_; }
  std::span<const NvmeImage> images() const { return images_; }
  // Of an image with elements.
  const ChunkShape& shape(uint32_t image) const { return *shapes_[image]; }
  const ExtentPlan& extents() const { return *extents_; }
  // The parameter images of a unit: the first, and how many; 0 when it has none.
  struct ImageRange {
    uint32_t first = 0;
    uint32_t count = 0;
  };
  ImageRange parameter_images(uint32_t unit) const { return parameters_[unit]; }
  // The parameter image of the elements of a state image, or kNoImage.
  uint32_t parameter_image_of(uint32_t chunk) const { return parameter_of_chunk_[chunk]; }
  uint64_t max_image_bytes() const { return max_image_bytes_; }

  SlotTableShape table_shape(uint64_t job_id, uint64_t layout_fingerprint) const;
  // The region of the table: the table, then one u64 an image that says where it shall rest (0:
  // as planned, 1: host, 2: nvme), at a multiple of 64 bytes. A multiple of 4096.
  uint64_t table_bytes() const;
  uint64_t targets_offset() const;

  // Bytes of partition memory that images at home on the tier do not take: the whole pages of each
  // of their arrays.
  uint64_t unbacked_bytes() const { return unbacked_bytes_; }

  // Bytes of the arrays of all images at home on the tier.
  uint64_t home_bytes() const;

  // Room in the manifest for the numbers of a job, and the user_state of all ranks.
  static uint64_t ManifestExtra(const model::v1::EngineConfig& config, uint64_t parameters);

  // Buffers of one image each that a worker of `lanes` compute threads has for staging.
  uint64_t StagingBuffers(const model::v1::NvmeConfig& config, uint32_t lanes) const;

  // The states of a unit rest elsewhere from now on: for accounts of what takes memory. Files and
  // slots are the same wherever they rest.
  void SetStateHome(uint32_t unit, bool home);

 private:
  NvmePlan() = default;
  absl::Status AddImage(NvmeImage image);
  absl::Status AddStates(const Layout& layout, const PartitionPlan& partition,
                         const model::v1::EngineConfig& config);
  absl::Status AddParameters(const Layout& layout, const PartitionPlan& partition,
                             const model::v1::EngineConfig& config);

  uint32_t chunks_ = 0;
  std::vector<NvmeImage> images_;
  std::vector<std::optional<ChunkShape>> shapes_;
  std::vector<ImageRange> parameters_;
  std::vector<uint32_t> parameter_of_chunk_;
  std::optional<ExtentPlan> extents_;
  uint64_t max_image_bytes_ = 0;
  uint64_t unbacked_bytes_ = 0;
};

// Where an image shall rest; the words at targets_offset().
enum class NvmeTarget : uint64_t { kAsPlanned = 0, kHost = 1, kNvme = 2 };

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_NVME_PLAN_H_
