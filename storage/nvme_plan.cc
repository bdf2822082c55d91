#include "storage/nvme_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/dtype.h"
#include "base/status.h"
#include "storage/bytes.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPage = 4096;

// Bytes of the pages that lie whole within a range.
uint64_t WholePages(uint64_t offset, uint64_t bytes) {
  const uint64_t begin = RoundUpTo(offset, kPage);
  const uint64_t end = (offset + bytes) / kPage * kPage;
  return end > begin ? end - begin : 0;
}

// Whether the `index`-th of many belongs to a fraction of them, spread evenly.
bool InFraction(uint32_t index, double fraction) {
  return std::floor((index + 1.0) * fraction) > std::floor(index * fraction);
}

}  // namespace

absl::Status NvmePlan::AddImage(NvmeImage image) {
  std::vector<ChunkArray> arrays;
  for (const PartitionArray& array : image.arrays) arrays.push_back(array.array);
  shapes_.emplace_back();
  if (arrays.empty()) {
    image.elements = 0;
    image.home = false;
  } else {
    ZS_ASSIGN_OR_RETURN(shapes_.back(), ChunkShape::Create(arrays));
    max_image_bytes_ = std::max(max_image_bytes_, shapes_.back()->image_bytes());
    for (const PartitionArray& array : image.arrays) {
      if (image.home) unbacked_bytes_ += WholePages(array.offset, array.array.bytes);
    }
  }
  images_.push_back(std::move(image));
  return absl::OkStatus();
}

absl::Status NvmePlan::AddStates(const Layout& layout, const PartitionPlan& partition,
                                 const model::v1::EngineConfig& config) {
  const bool at_home = config.optimizer_tier() == model::v1::TIER_NVME;
  for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
    const ChunkPlan& plan = partition.chunks()[chunk];
    NvmeImage image{.unit = plan.unit, .begin = plan.begin, .elements = plan.elements};
    image.home = at_home && InFraction(chunk, config.optimizer_ratio());
    if (HasStates(config)) image.arrays = ChunkArraysOf(layout, partition, chunk);
    ZS_RETURN_IF_ERROR(AddImage(std::move(image)));
  }
  return absl::OkStatus();
}

absl::Status NvmePlan::AddParameters(const Layout& layout, const PartitionPlan& partition,
                                     const model::v1::EngineConfig& config) {
  uint64_t on_host = 0;
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const UnitPlan& unit = partition.unit(u);
    parameters_[u].first = static_cast<uint32_t>(images_.size());
    if (config.parameter_tier() != model::v1::TIER_NVME || unit.resident) continue;
    on_host += layout.units()[u].data_elements;
    if (on_host <= config.host_parameter_elements()) continue;
    const auto bytes = static_cast<uint32_t>(SizeOf(layout.units()[u].dtype));
    const uint64_t first = unit.shard.first_element();
    for (uint64_t done = 0; done < unit.shard.elements(); done += partition.chunk_elements()) {
      NvmeImage image{.unit = u, .begin = first + done, .parameters = true, .home = true};
      image.elements = std::min(partition.chunk_elements(), unit.shard.elements() - done);
      image.arrays.push_back({{ChunkArrayKind::kParameter, bytes, image.elements * bytes},
                              unit.shard_data + done * bytes});
      // Where a unit has states, they are cut at the same places.
      if (unit.chunks > parameters_[u].count) {
        parameter_of_chunk_[unit.first_chunk + parameters_[u].count] =
            static_cast<uint32_t>(images_.size());
      }
      ++parameters_[u].count;
      ZS_RETURN_IF_ERROR(AddImage(std::move(image)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<NvmePlan> NvmePlan::Create(const Layout& layout, const PartitionPlan& partition,
                                          const model::v1::EngineConfig& config,
                                          std::span<const uint64_t> weights) {
  NvmePlan plan;
  plan.chunks_ = static_cast<uint32_t>(partition.chunks().size());
  plan.parameters_.resize(layout.units().size());
  plan.parameter_of_chunk_.resize(plan.chunks_, kNoImage);
  ZS_RETURN_IF_ERROR(plan.AddStates(layout, partition, config));
  ZS_RETURN_IF_ERROR(plan.AddParameters(layout, partition, config));
  // A worker of a small job may have nothing at all.
  if (plan.images_.empty()) ZS_RETURN_IF_ERROR(plan.AddImage({.parameters = true}));
  std::vector<uint64_t> bytes;
  for (const std::optional<ChunkShape>& shape : plan.shapes_) {
    bytes.push_back(shape.has_value() ? shape->image_bytes() : 0);
  }
  ZS_ASSIGN_OR_RETURN(plan.extents_, ExtentPlan::Create(bytes, weights, config.nvme().spares()));
  return plan;
}

uint64_t NvmePlan::home_bytes() const {
  uint64_t bytes = 0;
  for (const NvmeImage& image : images_) {
    if (!image.home) continue;
    for (const PartitionArray& array : image.arrays) bytes += array.array.bytes;
  }
  return bytes;
}

uint64_t NvmePlan::ManifestExtra(const model::v1::EngineConfig& config, uint64_t parameters) {
  constexpr uint64_t kNumbers = 512;
  constexpr uint64_t kCount = 10;    // of a parameter's updates, as a varint
  constexpr uint64_t kFraming = 16;  // of each user_state
  return kNumbers + parameters * kCount +
         config.world_size() * (config.user_state_bytes() + kFraming);
}

uint64_t NvmePlan::StagingBuffers(const model::v1::NvmeConfig& config, uint32_t lanes) const {
  const auto images = static_cast<uint64_t>(
      std::ranges::count_if(images_, [](const NvmeImage& image) { return image.elements > 0; }));
  // Each lane reads one image and fills another; one of each is on its way.
  const uint64_t wanted = std::max<uint64_t>(uint64_t{config.buffer_count()} * config.queue_depth(),
                                             uint64_t{2} * lanes + 2);
  return std::min(images, wanted);
}

void NvmePlan::SetStateHome(uint32_t unit, bool home) {
  for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
    NvmeImage& image = images_[chunk];
    if (image.unit != unit || image.elements == 0 || image.home == home) continue;
    image.home = home;
    for (const PartitionArray& array : image.arrays) {
      const uint64_t bytes = WholePages(array.offset, array.array.bytes);
      unbacked_bytes_ = home ? unbacked_bytes_ + bytes : unbacked_bytes_ - bytes;
    }
  }
}

SlotTableShape NvmePlan::table_shape(uint64_t job_id, uint64_t layout_fingerprint) const {
  return {.chunks = static_cast<uint32_t>(images_.size()),
          .slots = extents_->slots(),
          .job_id = job_id,
          .layout_fingerprint = layout_fingerprint,
          .plan_fingerprint = extents_->fingerprint()};
}

uint64_t NvmePlan::targets_offset() const {
  return RoundUpTo(SlotTable::Bytes(static_cast<uint32_t>(images_.size()), extents_->slots()), 64);
}

uint64_t NvmePlan::table_bytes() const {
  return RoundUpTo(targets_offset() + images_.size() * sizeof(uint64_t), kPage);
}

}  // namespace zeroshard
