// Pages of a partition whose contents come to the host and leave it, image by image.
//
// A page is given back when all of its bytes are of images that are elsewhere. In a tiered job each
// unit's part of a kind of state has its pages for itself. Loop thread only.
#ifndef ZEROSHARD_WORKER_PARTITION_PAGES_H_
#define ZEROSHARD_WORKER_PARTITION_PAGES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "storage/chunk_arrays.h"
#include "worker/job_memory.h"

namespace zeroshard {

// An image and where its arrays lie in the partition.
struct ImagePages {
  uint32_t unit = 0;
  bool parameters = false;
  std::span<const PartitionArray> arrays;
};

class PartitionPages {
 public:
  using Away = absl::FunctionRef<bool(uint32_t image)>;

  // `images` in order of their places; `memory` and what lies behind the spans must outlive this.
  PartitionPages(const JobMemory& memory, std::vector<ImagePages> images)
      : memory_(memory), images_(std::move(images)) {}

  // Memory for what comes to the host: an error now rather than a signal at the first touch.
  absl::Status Reserve(uint32_t image) const;
  // Gives back the pages of the image, which is elsewhere, as are those that `away` says. A failure
  // is only logged: the memory is held for longer.
  void Punch(uint32_t image, Away away) const;

 private:
  void PunchArray(uint32_t image, size_t array, Away away) const;

  const JobMemory& memory_;
  const std::vector<ImagePages> images_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_PARTITION_PAGES_H_
