#include "worker/state_mover.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// A step that comes meanwhile waits so long.
constexpr absl::Duration kLongSlice = absl::Milliseconds(10);
constexpr uint32_t kMaxSlice = 16;
constexpr absl::Duration kRestAfterError = absl::Seconds(10);

}  // namespace

void StateMover::OnCommand(const internal::v1::MoveStates& command) {
  std::vector<bool> chosen(context_.layout().units().size(), command.units().empty());
  for (const uint32_t unit : command.units()) {
    if (unit < chosen.size()) chosen[unit] = true;
  }
  for (uint32_t image = 0; image < tiers_.images().size(); ++image) {
    const TierImage& described = tiers_.images()[image];
    if (described.elements == 0 || described.parameters || !chosen[described.unit]) continue;
    tiers_.SetTarget(image, command.to());
  }
  bytes_per_second_ = command.bytes_per_second();
  next_ = context_.now();
  pending_ = true;
  LogInfo(absl::StrCat("states are moved to=", model::v1::Tier_Name(command.to()),
                       " bytes=", LeftBytes(), " bytes_per_second=", bytes_per_second_));
}

bool StateMover::IsMisplaced(uint32_t image) const {
  const TierImage& described = tiers_.images()[image];
  return described.elements > 0 && tiers_.HolderOf(image) != tiers_.HomeOf(image) &&
         shard_.IsPut(described.unit, {described.begin / kGrainElements,
                                       (described.begin + described.elements) / kGrainElements});
}

uint64_t StateMover::LeftBytes() const {
  uint64_t bytes = 0;
  if (!pending_) return bytes;
  for (uint32_t image = 0; image < tiers_.images().size(); ++image) {
    if (IsMisplaced(image)) bytes += tiers_.BytesOf(image);
  }
  return bytes;
}

std::vector<uint32_t> StateMover::NextSlice() {
  const auto images = static_cast<uint32_t>(tiers_.images().size());
  // Of a bounded rate a tenth of a second's share.
  const uint64_t enough = bytes_per_second_ == 0 ? ~uint64_t{0} : bytes_per_second_ / 10;
  uint64_t bytes = 0;
  std::vector<uint32_t> slice;
  for (uint32_t looked = 0; looked < images && slice.size() < slice_ && bytes <= enough; ++looked) {
    cursor_ = cursor_ < images ? cursor_ : 0;
    if (IsMisplaced(cursor_)) {
      slice.push_back(cursor_);
      bytes += tiers_.BytesOf(cursor_);
    }
    ++cursor_;
  }
  return slice;
}

void StateMover::Advance() {
  const absl::Duration start = context_.now();
  if (!pending_ || start < next_) return;
  const std::vector<uint32_t> slice = NextSlice();
  if (slice.empty()) {
    pending_ = false;
    if (std::exchange(moved_, 0) > 0) LogInfo("all states are where they shall rest");
    return;
  }
  ZS_FAULT_POINT("worker.tier.move");
  const absl::Status status = tiers_.Move(slice);
  const absl::Duration took = context_.now() - start;
  if (!status.ok()) {
    LogWarn(absl::StrCat("states are not moved error=\"", status.message(), "\""));
    next_ = context_.now() + kRestAfterError;
    return;
  }
  uint64_t bytes = 0;
  for (const uint32_t image : slice) bytes += tiers_.BytesOf(image);
  moved_ += bytes;
  if (took > kLongSlice) slice_ = std::max(1u, slice_ / 2);
  if (took < kLongSlice / 2) slice_ = std::min(kMaxSlice, slice_ * 2);
  // Half of the time is left for the job.
  absl::Duration pause = took;
  if (bytes_per_second_ > 0) {
    const absl::Duration share =
        absl::Seconds(static_cast<double>(bytes) / static_cast<double>(bytes_per_second_));
    pause = std::max(pause, share - took);
  }
  next_ = context_.now() + pause;
}

}  // namespace zeroshard
