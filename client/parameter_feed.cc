#include "client/parameter_feed.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "storage/bytes.h"
#include "storage/partition.h"

namespace zeroshard {

absl::StatusOr<uint64_t> ParameterFeed::Gather(uint32_t unit, bool prefetch, const Submit& submit) {
  absl::MutexLock lock(&mu_);
  const uint64_t bytes = RoundUpTo(shard_bytes_[unit], kParameterRingAlignment);
  ZS_ASSIGN_OR_RETURN(const uint64_t at, TakeRoom(bytes));
  trainer::v1::SessionRequest request;
  request.mutable_gather()->add_units(unit);
  request.mutable_gather()->set_prefetch(prefetch);
  request.mutable_gather()->set_window_offset(offset_ + at);
  ZS_ASSIGN_OR_RETURN(const uint64_t id, submit(std::move(request)));
  shards_.push_back({.unit = unit, .request = id, .at = at, .bytes = bytes, .mark = {}});
  end_ = at + bytes;
  return id;
}

// Where the next shard goes: behind the last one, or at the beginning. What lies there goes first,
// and all before it.
absl::StatusOr<uint64_t> ParameterFeed::TakeRoom(uint64_t bytes) {
  if (bytes > bytes_) {
    return absl::InternalError(absl::StrCat("a shard of ", bytes, " bytes for a ring of ", bytes_));
  }
  const uint64_t at = end_ + bytes <= bytes_ ? end_ : 0;
  const auto is_in_the_way = [&](const Shard& shard) {
    return shard.at < at + bytes && at < shard.at + shard.bytes;
  };
  const auto is_over = [](const Shard& shard) {
    return shard.bytes == 0 && shard.mark.has_value();
  };
  while (std::ranges::any_of(shards_, is_in_the_way) ||
         (!shards_.empty() && is_over(shards_.front()))) {
    ZS_RETURN_IF_ERROR(ArrangeFirst(1));
    ZS_RETURN_IF_ERROR(plane_.AwaitCopied(*shards_.front().mark));
    shards_.pop_front();
    --arranged_;
  }
  return at;
}

absl::Status ParameterFeed::ArrangeFirst(size_t shards) {
  for (; arranged_ < shards; ++arranged_) {
    Shard& shard = shards_[arranged_];
    ZS_RETURN_IF_ERROR(channel_.Wait(shard.request, channel_.timeout()));
    ZS_ASSIGN_OR_RETURN(shard.mark, plane_.GatherFrom(shard.unit, offset_ + shard.at));
    ++current_[shard.unit];
  }
  return absl::OkStatus();
}

absl::Status ParameterFeed::Arrange(std::span<const uint32_t> units) {
  absl::MutexLock lock(&mu_);
  size_t count = arranged_;
  for (const uint32_t unit : units) {
    if (unit >= current_.size() || current_[unit] > 0) continue;
    const auto waiting = shards_.begin() + static_cast<std::ptrdiff_t>(arranged_);
    const auto first = std::find_if(waiting, shards_.end(),
                                    [&](const Shard& shard) { return shard.unit == unit; });
    if (first == shards_.end()) continue;
    count = std::max(count, static_cast<size_t>(first - shards_.begin()) + 1);
  }
  return ArrangeFirst(count);
}

void ParameterFeed::Released(std::span<const uint32_t> units) {
  absl::MutexLock lock(&mu_);
  for (const uint32_t unit : units) {
    if (current_[unit] > 0) --current_[unit];
  }
}

absl::Status ParameterFeed::ArrangeAll() {
  absl::MutexLock lock(&mu_);
  return ArrangeFirst(shards_.size());
}

absl::Status ParameterFeed::EndStep() {
  absl::MutexLock lock(&mu_);
  ZS_RETURN_IF_ERROR(ArrangeFirst(shards_.size()));
  std::ranges::fill(current_, 0);
  return absl::OkStatus();
}

}  // namespace zeroshard
