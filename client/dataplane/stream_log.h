// StreamLog: a stream of the data plane's own, and how far the device has come with what was put on
// it.
//
// Work is marked; marks are numbered from 1 and become done in order. A mark costs one event, taken
// from a pool. One caller at a time. The device outlives it.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_STREAM_LOG_H_
#define ZEROSHARD_CLIENT_DATAPLANE_STREAM_LOG_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "device/cuda/device.h"
#include "device/cuda/stream.h"

namespace zeroshard {

class StreamLog {
 public:
  // What a mark stands for, in errors: "all-gather of unit 3".
  struct Work {
    const char* kind = "";
    uint32_t unit = 0;
  };

  static absl::StatusOr<StreamLog> Create(const CudaDevice& device, StreamPriority priority);

  CudaStream& stream() { return stream_; }

  // The end of all work put on the stream so far.
  absl::StatusOr<uint64_t> Mark(Work work);
  // Whether everything up to `mark` is done; 0 always is. Asks the device where it is not known.
  absl::StatusOr<bool> Done(uint64_t mark);
  // The last one that was given.
  uint64_t last() const { return next_ - 1; }
  // What `stream` is given from now on waits for `mark`.
  absl::Status Order(CudaStream& stream, uint64_t mark);

  // DeadlineExceeded, naming the work, when marks are open and none became done for `patience`.
  absl::Status CheckProgress(absl::Duration patience);

 private:
  struct Entry {
    uint64_t mark;
    Work work;
    CudaEvent event;
  };

  StreamLog(const CudaDevice& device, CudaStream stream)
      : device_(&device), stream_(std::move(stream)) {}

  const CudaDevice* device_;
  CudaStream stream_;
  std::deque<Entry> open_;  // oldest first
  std::vector<CudaEvent> free_;
  uint64_t next_ = 1;
  absl::Time moved_ = absl::InfinitePast();  // when a mark last became done, or the first was given
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_STREAM_LOG_H_
