#include "worker/state_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"

namespace zeroshard {
namespace {

std::vector<ImagePages> PagesOf(const NvmePlan& plan) {
  std::vector<ImagePages> pages;
  for (const NvmeImage& image : plan.images()) {
    pages.push_back({image.unit, image.parameters, image.arrays});
  }
  return pages;
}

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
    : memory_(memory), tier_(std::move(tier)), pages_(memory, PagesOf(tier_->plan())) {}

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

absl::Status StateTier::Run(std::span<const TierItem> items, NvmeTier::Work work, TierFeed* feed) {
  ZS_RETURN_IF_ERROR(FollowCommit());
  if (items.empty()) return absl::OkStatus();
  ZS_FAULT_STATUS("worker.tier.run");
  return tier_->Run(items, work, feed);
}

absl::Status StateTier::Promote(std::span<const uint32_t> images) {
  std::vector<uint32_t> held;
  for (const uint32_t image : images) {
    if (!Holds(image)) continue;
    ZS_RETURN_IF_ERROR(pages_.Reserve(image));
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

absl::Status StateTier::Rebuild(uint32_t image, absl::FunctionRef<absl::Status()> fill) {
  ZS_RETURN_IF_ERROR(FollowCommit());
  if (open_ != kNothing && open_ != committed_) {
    return absl::FailedPreconditionError("a step is under way");
  }
  ZS_RETURN_IF_ERROR(pages_.Reserve(image));
  if (absl::Status status = fill(); !status.ok()) {
    Punch(image);
    return status;
  }
  ZS_FAULT_POINT("worker.tier.rebuild.before_forget");
  ZS_RETURN_IF_ERROR(Discard({&image, 1}));
  ++rebuilt_images_;
  return Demote({&image, 1});
}

absl::Status StateTier::Read(std::span<const uint32_t> images, Reader reader) {
  return Run(ItemsOf(images, /*read=*/true), [&](const TierItem& item, const TierBuffers& buffers) {
    return reader(item.read, buffers.read);
  });
}

void StateTier::Punch(uint32_t image) const {
  pages_.Punch(image, [&](uint32_t other) { return Holds(other); });
}

}  // namespace zeroshard
