// The bytes of one slot of the NVMe tier: a header block and the arrays of one chunk. Encoded and
// verified in the caller's buffer, without copies. Pure; any thread. Format page: docs/nvme.md.
//
// A buffer holds one image, so its arrays are written and computed where they lie:
//   shape = ChunkShape::Create(arrays);  buffer of shape.image_bytes(), aligned to 4096
//   ... arrays at shape.offset(i) ...
//   checksum = EncodeChunkImage(buffer, shape, identity);       write the buffer to its slot
//   read the slot into a buffer;  VerifyChunkImage(buffer, shape, {identity, checksum}, file)
#ifndef ZEROSHARD_STORAGE_CHUNK_IMAGE_H_
#define ZEROSHARD_STORAGE_CHUNK_IMAGE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

inline constexpr uint64_t kImageAlignment = 4096;
inline constexpr uint64_t kImageHeaderBytes = 4096;
inline constexpr uint64_t kImageArrayAlignment = 64;
inline constexpr uint32_t kImagePieceBytes = 64 * 1024;
inline constexpr uint32_t kMaxImagePieces = 471;
inline constexpr uint32_t kMaxImageArrays = 8;

// What an array holds; part of the format.
enum class ChunkArrayKind : uint32_t {
  kMaster = 1,
  kState0 = 2,
  kState1 = 3,
  kScales0 = 4,
  kScales1 = 5,
  kParameter = 6,
};

struct ChunkArray {
  ChunkArrayKind kind = ChunkArrayKind::kMaster;
  uint32_t element_bytes = 0;
  uint64_t bytes = 0;
};

// Where the arrays lie in an image.
class ChunkShape {
 public:
  // InvalidArgument: no or more than kMaxImageArrays arrays, one of 0 bytes or of a broken number
  // of elements, more than kMaxImagePieces pieces together.
  static absl::StatusOr<ChunkShape> Create(std::span<const ChunkArray> arrays);

  std::span<const ChunkArray> arrays() const { return arrays_; }
  // Of array `index` in the image; a multiple of kImageArrayAlignment.
  uint64_t offset(size_t index) const { return offsets_[index]; }
  uint64_t payload_bytes() const { return payload_bytes_; }  // without the padding at its end
  uint64_t image_bytes() const { return image_bytes_; }      // a multiple of kImageAlignment
  uint32_t pieces() const;

 private:
  ChunkShape() = default;

  std::vector<ChunkArray> arrays_;
  std::vector<uint64_t> offsets_;
  uint64_t payload_bytes_ = 0;
  uint64_t image_bytes_ = 0;
};

// Which image this is: whose, of what, where it was meant to go, and of when.
struct ImageIdentity {
  uint64_t job_id = 0;
  uint64_t layout_fingerprint = 0;
  uint32_t worker = 0;
  uint32_t unit = 0;
  uint64_t first_grain = 0;  // of the unit
  uint64_t grains = 0;
  uint32_t chunk = 0;
  uint32_t path = 0;
  uint64_t offset = 0;  // of the slot in its file
  uint64_t generation = 0;
  uint64_t attempt = 0;
  uint64_t step = 0;
  friend bool operator==(const ImageIdentity&, const ImageIdentity&) = default;
};

// Fills in the header and zeroes all padding. Returns the checksum of the header, which stands for
// the whole image. `image` has exactly shape.image_bytes().
uint64_t EncodeChunkImage(std::span<std::byte> image, const ChunkShape& shape,
                          const ImageIdentity& identity);

struct ExpectedImage {
  ImageIdentity identity;
  // What EncodeChunkImage returned. Without it any whole image of the identity will do.
  std::optional<uint64_t> checksum;
};

// OK when `image` is the expected one, whole. Otherwise DataLoss: the file, the offset in the file,
// and what was found and expected (docs/nvme.md lists them).
absl::Status VerifyChunkImage(std::span<const std::byte> image, const ChunkShape& shape,
                              const ExpectedImage& expected, const std::string& file);

// Whatever image the header block says it is, for tools and messages; its payload is not looked at.
// DataLoss when it is not a whole header of this format. `offset` is that of the block in the file.
absl::StatusOr<ImageIdentity> ReadImageIdentity(std::span<const std::byte> header,
                                                const std::string& file, uint64_t offset);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_CHUNK_IMAGE_H_
