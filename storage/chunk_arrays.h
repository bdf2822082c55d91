// What a chunk of a partition consists of at rest: the arrays that leave host memory when optimizer
// states live on the NVMe tier. Pure. Format page: docs/nvme.md.
#ifndef ZEROSHARD_STORAGE_CHUNK_ARRAYS_H_
#define ZEROSHARD_STORAGE_CHUNK_ARRAYS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/chunk_image.h"
#include "storage/layout.h"
#include "storage/partition.h"

namespace zeroshard {

// One array of a chunk, and where the same bytes lie in a partition region on the host tier.
struct PartitionArray {
  ChunkArray array;
  uint64_t offset = 0;  // in the region
};

// Master, states and scales of the chunk, those that its unit has, in the order of the image. Empty
// for a chunk whose unit has none: fp32 parameters (their own master) without states.
std::vector<PartitionArray> ChunkArraysOf(const Layout& layout, const PartitionPlan& plan,
                                          uint32_t chunk);

// Bytes of each chunk's image, 0 for one without arrays: the input of ExtentPlan.
absl::StatusOr<std::vector<uint64_t>> ImageBytesOf(const Layout& layout, const PartitionPlan& plan);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_CHUNK_ARRAYS_H_
