#include "worker/tier_set.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {

TierSet::TierSet(const JobMemory& memory, std::unique_ptr<StateTier> nvme,
                 std::unique_ptr<DeviceShard> device)
    : memory_(memory), nvme_(std::move(nvme)), device_(std::move(device)) {
  if (device_ != nullptr) tiers_.push_back(device_.get());
  if (nvme_ != nullptr) tiers_.push_back(nvme_.get());
  if (nvme_ != nullptr) {
    for (const NvmeImage& image : nvme_->plan().images()) {
      images_.push_back({image.unit, image.begin, image.elements, image.parameters});
    }
  }
  if (device_ == nullptr) return;
  const std::span<const DeviceImage> on_device = memory.device_plan()->images();
  if (images_.size() < on_device.size()) images_.resize(on_device.size());
  for (size_t image = 0; image < on_device.size(); ++image) {
    const DeviceImage& described = on_device[image];
    images_[image] = {described.unit, described.begin, described.elements, false};
  }
}

const ChunkShape& TierSet::shape(uint32_t image) const {
  const bool on_nvme = nvme_ != nullptr && nvme_->plan().images()[image].elements > 0;
  return on_nvme ? nvme_->plan().shape(image) : memory_.device_plan()->shape(image);
}

ChunkTier* TierSet::HolderOf(uint32_t image) const {
  if (image >= images_.size() || images_[image].elements == 0) return nullptr;
  for (ChunkTier* tier : tiers_) {
    if (tier->Holds(image)) return tier;
  }
  return nullptr;
}

ChunkTier* TierSet::HomeOf(uint32_t image) const {
  if (image >= images_.size() || images_[image].elements == 0) return nullptr;
  // With a device its table has the last word, for all tiers.
  if (device_ != nullptr && !device_->IsPlanned(image)) {
    return device_->AtHome(image)        ? device_.get()
           : device_->RestsOnNvme(image) ? static_cast<ChunkTier*>(nvme_.get())
                                         : nullptr;
  }
  for (ChunkTier* tier : tiers_) {
    if (tier->AtHome(image)) return tier;
  }
  return nullptr;
}

void TierSet::SetTarget(uint32_t image, model::v1::Tier target) {
  if (device_ != nullptr) {
    device_->SetTarget(image, target);
  } else if (nvme_ != nullptr) {
    nvme_->SetTarget(image, target == model::v1::TIER_NVME ? NvmeTarget::kNvme : NvmeTarget::kHost);
  }
}

std::vector<uint32_t> TierSet::HeldBy(const ChunkTier& tier,
                                      std::span<const uint32_t> images) const {
  std::vector<uint32_t> held;
  for (const uint32_t image : images) {
    if (HolderOf(image) == &tier) held.push_back(image);
  }
  return held;
}

absl::Status TierSet::Promote(std::span<const uint32_t> images) {
  for (ChunkTier* tier : tiers_) ZS_RETURN_IF_ERROR(tier->Promote(HeldBy(*tier, images)));
  return absl::OkStatus();
}

absl::Status TierSet::Discard(std::span<const uint32_t> images) {
  for (ChunkTier* tier : tiers_) ZS_RETURN_IF_ERROR(tier->Discard(HeldBy(*tier, images)));
  return absl::OkStatus();
}

absl::Status TierSet::Settle(std::span<const uint32_t> images) {
  for (ChunkTier* tier : tiers_) {
    std::vector<uint32_t> leaving;
    for (const uint32_t image : images) {
      if (HolderOf(image) == nullptr && HomeOf(image) == tier) leaving.push_back(image);
    }
    ZS_RETURN_IF_ERROR(tier->Demote(leaving));
  }
  return absl::OkStatus();
}

absl::Status TierSet::Move(std::span<const uint32_t> images) {
  std::vector<uint32_t> elsewhere;
  for (const uint32_t image : images) {
    if (HolderOf(image) != HomeOf(image)) elsewhere.push_back(image);
  }
  ZS_RETURN_IF_ERROR(Promote(elsewhere));
  ZS_RETURN_IF_ERROR(Settle(elsewhere));
  for (const uint32_t image : elsewhere) {
    if (HolderOf(image) == HomeOf(image)) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "no room for states of unit ", images_[image].unit, " in the memory of the gpu"));
  }
  return absl::OkStatus();
}

absl::Status TierSet::Read(std::span<const uint32_t> images, ChunkTier::Reader reader) {
  for (ChunkTier* tier : tiers_) ZS_RETURN_IF_ERROR(tier->Read(HeldBy(*tier, images), reader));
  return absl::OkStatus();
}

std::vector<uint32_t> TierSet::StateImages(uint32_t unit, uint64_t begin, uint64_t end) const {
  const UnitPlan& unit_plan = memory_.plan().unit(unit);
  std::vector<uint32_t> found;
  for (uint32_t i = 0; i < unit_plan.chunks && !empty(); ++i) {
    const TierImage& image = images_[unit_plan.first_chunk + i];
    if (image.elements == 0 || image.begin + image.elements <= begin) continue;
    if (image.begin >= end) break;
    found.push_back(unit_plan.first_chunk + i);
  }
  return found;
}

std::vector<uint32_t> TierSet::ParameterImages(uint32_t unit, uint64_t begin, uint64_t end) const {
  std::vector<uint32_t> found;
  if (nvme_ == nullptr) return found;
  const NvmePlan::ImageRange range = nvme_->plan().parameter_images(unit);
  for (uint32_t image = range.first; image < range.first + range.count; ++image) {
    const TierImage& described = images_[image];
    if (described.begin + described.elements <= begin) continue;
    if (described.begin >= end) break;
    found.push_back(image);
  }
  return found;
}

uint64_t TierSet::HeldBytes(const ChunkTier& tier) const {
  uint64_t bytes = 0;
  for (uint32_t image = 0; image < images_.size(); ++image) {
    if (HolderOf(image) == &tier) bytes += BytesOf(image);
  }
  return bytes;
}

}  // namespace zeroshard
