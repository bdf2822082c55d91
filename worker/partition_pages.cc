#include "worker/partition_pages.h"

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "storage/bytes.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPage = 4096;

}  // namespace

absl::Status PartitionPages::Reserve(uint32_t image) const {
  for (const PartitionArray& array : images_[image].arrays) {
    ZS_RETURN_IF_ERROR(
        Annotate(zeroshard::Reserve(memory_.partition_fd(), array.offset, array.array.bytes),
                 absl::StrCat("memory for states of job ", memory_.start().job())));
  }
  return absl::OkStatus();
}

void PartitionPages::Punch(uint32_t image, Away away) const {
  for (size_t array = 0; array < images_[image].arrays.size(); ++array) {
    PunchArray(image, array, away);
  }
}

void PartitionPages::PunchArray(uint32_t image, size_t array, Away away) const {
  const auto begin_of = [&](uint32_t i) { return images_[i].arrays[array].offset; };
  const auto end_of = [&](uint32_t i) {
    return begin_of(i) + images_[i].arrays[array].array.bytes;
  };
  const auto follows = [&](uint32_t left, uint32_t right) {
    return images_[left].unit == images_[right].unit && array < images_[left].arrays.size() &&
           array < images_[right].arrays.size() &&
           images_[left].parameters == images_[right].parameters && end_of(left) == begin_of(right);
  };
  uint32_t first = image;
  while (begin_of(first) % kPage != 0 && first > 0 && follows(first - 1, first) &&
         away(first - 1)) {
    --first;
  }
  uint32_t last = image;
  const auto has_next = [&] { return last + 1 < images_.size() && follows(last, last + 1); };
  while (end_of(last) % kPage != 0 && has_next() && away(last + 1)) ++last;
  uint64_t end = end_of(last);
  if (!has_next() && memory_.config().tiered()) end = RoundUpTo(end, kPage);
  const absl::Status status =
      PunchHole(memory_.partition_fd(), begin_of(first), end - begin_of(first));
  if (!status.ok()) {
    LogWarn(absl::StrCat("partition pages not given back image=", image, " error=\"",
                         status.message(), "\""));
  }
}

}  // namespace zeroshard
