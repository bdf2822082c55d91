#include "storage/extent_plan.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/status.h"
#include "storage/chunk_image.h"

namespace zeroshard {
namespace {

using Wide = unsigned __int128;

constexpr uint64_t kPlanVersion = 1;

absl::Status CheckInput(std::span<const uint64_t> image_bytes, std::span<const uint64_t> weights,
                        uint32_t spares_per_path) {
  if (image_bytes.empty() || image_bytes.size() > kMaxSlotChunks || spares_per_path > (1u << 20)) {
    return absl::InvalidArgumentError(
        absl::StrCat(image_bytes.size(), " chunks with ", spares_per_path, " spare slots a path"));
  }
  if (weights.empty() || weights.size() > kMaxExtentPaths) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights.size(), " nvme paths; 1 to ", kMaxExtentPaths));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0 || weights[i] > kMaxPathWeight) {
      return absl::InvalidArgumentError(
          absl::StrCat("nvme path ", i, " has the weight ", weights[i]));
    }
  }
  Wide total = 0;
  for (uint64_t bytes : image_bytes) {
    if (bytes % kImageAlignment != 0) {
      return absl::InvalidArgumentError(absl::StrCat("a chunk image of ", bytes, " bytes"));
    }
    total += Wide{2} * bytes;
  }
  total += Wide{spares_per_path} * weights.size() * std::ranges::max(image_bytes);
  if (total > kMaxExtentBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the slots take more than ", kMaxExtentBytes, " bytes"));
  }
  return absl::OkStatus();
}

uint64_t Fingerprint(std::span<const uint64_t> image_bytes, std::span<const uint64_t> weights,
                     uint32_t spares_per_path) {
  std::vector<uint64_t> words = {kPlanVersion, image_bytes.size(), weights.size(), spares_per_path};
  words.insert(words.end(), image_bytes.begin(), image_bytes.end());
  words.insert(words.end(), weights.begin(), weights.end());
  return Xxh3_64(words.data(), words.size() * sizeof(uint64_t));
}

}  // namespace

absl::StatusOr<ExtentPlan> ExtentPlan::Create(std::span<const uint64_t> image_bytes,
                                              std::span<const uint64_t> weights,
                                              uint32_t spares_per_path) {
  ZS_RETURN_IF_ERROR(CheckInput(image_bytes, weights, spares_per_path));
  ExtentPlan plan;
  plan.chunks_ = static_cast<uint32_t>(image_bytes.size());
  plan.file_bytes_.assign(weights.size(), kExtentFirstSlot);
  plan.step_bytes_.assign(weights.size(), 0);
  for (uint64_t bytes : image_bytes) {
    const uint32_t path = plan.Deal(bytes, weights);
    plan.PlaceSlot(path, bytes);
    plan.PlaceSlot(path, bytes);
    plan.step_bytes_[path] += bytes;
  }
  const uint64_t largest = std::ranges::max(image_bytes);
  for (uint32_t path = 0; path < weights.size(); ++path) {
    for (uint32_t i = 0; i < spares_per_path; ++i) plan.PlaceSlot(path, largest);
  }
  plan.fingerprint_ = Fingerprint(image_bytes, weights, spares_per_path);
  return plan;
}

// Of the paths that are not ahead of their share, the one that would finish the image first. The
// rule, and that no path gets ahead or behind by more than one image, is that of EEVDF (Stoica and
// Abdel-Wahab, 1995), with bytes for time.
uint32_t ExtentPlan::Deal(uint64_t bytes, std::span<const uint64_t> weights) const {
  const Wide dealt = std::accumulate(step_bytes_.begin(), step_bytes_.end(), Wide{0});
  const Wide weight = std::accumulate(weights.begin(), weights.end(), Wide{0});
  uint32_t best = kMaxExtentPaths;
  for (uint32_t path = 0; path < weights.size(); ++path) {
    if (step_bytes_[path] * weight > dealt * weights[path]) continue;
    // (a + c) / v < (b + c) / w, without division.
    if (best == kMaxExtentPaths || Wide{step_bytes_[path] + bytes} * weights[best] <
                                       Wide{step_bytes_[best] + bytes} * weights[path]) {
      best = path;
    }
  }
  return best;
}

void ExtentPlan::PlaceSlot(uint32_t path, uint64_t bytes) {
  slots_.push_back({path, file_bytes_[path], bytes});
  file_bytes_[path] += bytes;
}

uint64_t ExtentPlan::total_bytes() const {
  return std::accumulate(file_bytes_.begin(), file_bytes_.end(), uint64_t{0});
}

}  // namespace zeroshard
