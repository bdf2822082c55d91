#include "client/dataplane/stream_log.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"

namespace zeroshard {

absl::StatusOr<StreamLog> StreamLog::Create(const CudaDevice& device, StreamPriority priority) {
  ZS_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(device, priority));
  return StreamLog(device, std::move(stream));
}

absl::StatusOr<uint64_t> StreamLog::Mark(Work work) {
  ZS_RETURN_IF_ERROR(Done(last()).status());
  if (free_.empty()) {
    ZS_ASSIGN_OR_RETURN(CudaEvent event, CudaEvent::Create(*device_));
    free_.push_back(std::move(event));
  }
  ZS_RETURN_IF_ERROR(stream_.Record(free_.back()));
  if (open_.empty()) moved_ = absl::Now();
  open_.push_back({next_, work, std::move(free_.back())});
  free_.pop_back();
  return next_++;
}

absl::StatusOr<bool> StreamLog::Done(uint64_t mark) {
  while (!open_.empty() && open_.front().mark <= mark) {
    ZS_ASSIGN_OR_RETURN(const bool done, open_.front().event.Query());
    if (!done) return false;
    moved_ = absl::Now();
    free_.push_back(std::move(open_.front().event));
    open_.pop_front();
  }
  return true;
}

absl::Status StreamLog::Order(CudaStream& stream, uint64_t mark) {
  if (open_.empty() || mark < open_.front().mark) return absl::OkStatus();
  return stream.WaitFor(open_[mark - open_.front().mark].event);
}

absl::Status StreamLog::CheckProgress(absl::Duration patience) {
  ZS_RETURN_IF_ERROR(Done(last()).status());
  if (open_.empty()) return absl::OkStatus();
  const absl::Duration still = absl::Now() - moved_;
  if (still < patience) return absl::OkStatus();
  const Work& work = open_.front().work;
  return absl::DeadlineExceededError(
      absl::StrCat(work.kind, " of unit ", work.unit, " is not done after ",
                   absl::FormatDuration(still), ": a rank did not come, or hangs"));
}

}  // namespace zeroshard
