#include "worker/state_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/bytes.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPage = 4096;

std::vector<TierItem> ItemsOf(std::span<const uint32_t> images, bool read) {
  std::vector<TierItem> items;
  for (const uint32_t image : images) {
    items.push_back(read ? TierItem{.read = image, .tag = image}
                         : TierItem{.write = image, .tag = image});
  }
  return items;
}

}  // namespace

StateTier::StateTier(const JobMemory& memory, std::unique_ptr<NvmeTier> tier)
    : memory_(memory), tier_(std::move(tier)) {}

absl::Status StateTier::Recover() {
  ZS_RETURN_IF_ERROR(FollowCommit());
  for (uint32_t image = 0; image < plan().images().size(); ++image) {
    if (Holds(image)) Punch(image);
  }
  return absl::OkStatus();
}

absl::Status StateTier::FollowCommit() {
  const uint64_t committed = memory_.board().committed_attempt();
  if (committed == committed_) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(tier_->Commit(committed));
  committed_ = committed;
  open_ = kNothing;
  return absl::OkStatus();
}

absl::Status StateTier::Open(uint64_t attempt, uint64_t step) {
  ZS_RETURN_IF_ERROR(FollowCommit());
  if (open_ == attempt) return absl::OkStatus();
  open_ = kNothing;
  ZS_RETURN_IF_ERROR(tier_->Begin(attempt, step));
  open_ = attempt;
  return absl::OkStatus();
}

absl::Status StateTier::BeginCommitted() {
  ZS_RETURN_IF_ERROR(FollowCommit());
  return Open(committed_, memory_.board().numbers().step);
}

absl::Status StateTier::SealCommitted(const std::string& extra, uint64_t revision) {
  ZS_RETURN_IF_ERROR(BeginCommitted());
  return tier_->Seal(extra, revision);
}

absl::Status StateTier::Seal(const std::string& extra, uint64_t revision) {
  return tier_->Seal(extra, revision);
}

absl::Status StateTier::Run(std::span<const TierItem> items, NvmeTier::Work work) {
  ZS_RETURN_IF_ERROR(FollowCommit());
  if (items.empty()) return absl::OkStatus();
  ZS_FAULT_STATUS("worker.tier.run");
  return tier_->Run(items, work);
}

absl::Status StateTier::Promote(std::span<const uint32_t> images) {
  std::vector<uint32_t> held;
  for (const uint32_t image : images) {
    if (!Holds(image)) continue;
    ZS_RETURN_IF_ERROR(Reserve(image));
    held.push_back(image);
  }
  if (held.empty()) return absl::OkStatus();
  const absl::Status read =
      Run(ItemsOf(held, /*read=*/true), [&](const TierItem& item, const TierBuffers& buffers) {
        const ChunkShape& shape = plan().shape(item.read);
        const std::vector<PartitionArray>& arrays = plan().images()[item.read].arrays;
        for (size_t i = 0; i < arrays.size(); ++i) {
          std::memcpy(memory_.partition() + arrays[i].offset, buffers.read + shape.offset(i),
                      arrays[i].array.bytes);
        }
        return absl::OkStatus();
      });
  if (!read.ok()) {
    for (const uint32_t image : held) Punch(image);
    return read;
  }
  ZS_FAULT_POINT("worker.tier.promote.before_forget");
  return Discard(held);
}

absl::Status StateTier::Discard(std::span<const uint32_t> images) {
  ZS_RETURN_IF_ERROR(FollowCommit());
  for (const uint32_t image : images) {
    if (!Holds(image)) continue;
    ZS_RETURN_IF_ERROR(tier_->Forget(image));
  }
  return absl::OkStatus();
}

absl::Status StateTier::Demote(std::span<const uint32_t> images) {
  std::vector<uint32_t> on_host;
  for (const uint32_t image : images) {
    if (!Holds(image)) on_host.push_back(image);
  }
  if (on_host.empty()) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(BeginCommitted());
  ZS_RETURN_IF_ERROR(
      Run(ItemsOf(on_host, /*read=*/false), [&](const TierItem& item, const TierBuffers& buffers) {
        const ChunkShape& shape = plan().shape(item.write);
        const std::vector<PartitionArray>& arrays = plan().images()[item.write].arrays;
        for (size_t i = 0; i < arrays.size(); ++i) {
          std::memcpy(buffers.write + shape.offset(i), memory_.partition() + arrays[i].offset,
                      arrays[i].array.bytes);
        }
        return absl::OkStatus();
      }));
  ZS_FAULT_POINT("worker.tier.demote.before_punch");
  for (const uint32_t image : on_host) Punch(image);
  return absl::OkStatus();
}

void StateTier::Punch(uint32_t image) const {
  for (size_t array = 0; array < plan().images()[image].arrays.size(); ++array) {
    PunchArray(image, array);
  }
}

// Gives back the pages of which all bytes are the array's, or those of its neighbours that are on
// the tier, too. In a tiered job each unit's part of a kind of state has its pages for itself.
void StateTier::PunchArray(uint32_t image, size_t array) const {
  const std::span<const NvmeImage> images = plan().images();
  const auto begin_of = [&](uint32_t i) { return images[i].arrays[array].offset; };
  const auto end_of = [&](uint32_t i) { return begin_of(i) + images[i].arrays[array].array.bytes; };
  const auto follows = [&](uint32_t left, uint32_t right) {
    return images[left].unit == images[right].unit && array < images[left].arrays.size() &&
           array < images[right].arrays.size() &&
           images[left].parameters == images[right].parameters && end_of(left) == begin_of(right);
  };
  uint32_t first = image;
  while (begin_of(first) % kPage != 0 && first > 0 && follows(first - 1, first) &&
         Holds(first - 1)) {
    --first;
  }
  uint32_t last = image;
  const auto has_next = [&] { return last + 1 < images.size() && follows(last, last + 1); };
  while (end_of(last) % kPage != 0 && has_next() && Holds(last + 1)) ++last;
  uint64_t end = end_of(last);
  if (!has_next() && memory_.config().tiered()) end = RoundUpTo(end, kPage);
  const absl::Status status =
      PunchHole(memory_.partition_fd(), begin_of(first), end - begin_of(first));
  if (!status.ok()) {
    LogWarn(absl::StrCat("partition pages not given back image=", image, " error=\"",
                         status.message(), "\""));
  }
}

// Memory for what comes to the host: an error now rather than a signal at the first touch.
absl::Status StateTier::Reserve(uint32_t image) const {
  for (const PartitionArray& array : plan().images()[image].arrays) {
    ZS_RETURN_IF_ERROR(
        Annotate(zeroshard::Reserve(memory_.partition_fd(), array.offset, array.array.bytes),
                 absl::StrCat("memory for states of job ", memory_.start().job())));
  }
  return absl::OkStatus();
}

uint64_t StateTier::HeldBytes() const {
  uint64_t bytes = 0;
  for (uint32_t image = 0; image < plan().images().size(); ++image) {
    if (Holds(image)) bytes += BytesOf(image);
  }
  return bytes;
}

std::vector<uint32_t> StateTier::StateImages(uint32_t unit, uint64_t begin, uint64_t end) const {
  const UnitPlan& unit_plan = memory_.plan().unit(unit);
  std::vector<uint32_t> images;
  for (uint32_t i = 0; i < unit_plan.chunks; ++i) {
    const NvmeImage& image = plan().images()[unit_plan.first_chunk + i];
    if (image.elements == 0 || image.begin + image.elements <= begin) continue;
    if (image.begin >= end) break;
    images.push_back(unit_plan.first_chunk + i);
  }
  return images;
}

std::vector<uint32_t> StateTier::ParameterImages(uint32_t unit, uint64_t begin,
                                                 uint64_t end) const {
  const NvmePlan::ImageRange range = plan().parameter_images(unit);
  std::vector<uint32_t> images;
  for (uint32_t image = range.first; image < range.first + range.count; ++image) {
    const NvmeImage& described = plan().images()[image];
    if (described.begin + described.elements <= begin) continue;
    if (described.begin >= end) break;
    images.push_back(image);
  }
  return images;
}

}  // namespace zeroshard
