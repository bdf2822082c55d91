#include "storage/chunk_image.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/bytes.h"
#include "storage/file_io.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x314b4e554843535aULL;  // "ZSCHUNK1"
constexpr uint32_t kVersion = 1;

struct ArrayField {
  uint32_t kind;
  uint32_t element_bytes;
  uint64_t offset;
  uint64_t bytes;
};

struct ImageHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t arrays;
  uint64_t job_id;
  uint64_t layout_fingerprint;
  uint32_t worker;
  uint32_t unit;
  uint64_t first_grain;
  uint64_t grains;
  uint32_t chunk;
  uint32_t path;
  uint64_t offset;
  uint64_t generation;
  uint64_t attempt;
  uint64_t step;
  uint64_t payload_bytes;
  uint32_t pieces;
  uint32_t piece_bytes;
  ArrayField array[kMaxImageArrays];
  uint64_t piece[kMaxImagePieces];
  uint64_t checksum;
};
static_assert(offsetof(ImageHeader, array) == 112);
static_assert(offsetof(ImageHeader, piece) == 304);
static_assert(offsetof(ImageHeader, checksum) <= kImageHeaderBytes - 8);

constexpr size_t kChecksumOffset = kImageHeaderBytes - sizeof(uint64_t);

uint64_t HeaderChecksum(std::span<const std::byte> image) {
  return Xxh3_64(image.first(kChecksumOffset));
}

uint64_t StoredChecksum(std::span<const std::byte> image) {
  uint64_t value;
  std::memcpy(&value, image.data() + kChecksumOffset, sizeof(value));
  return value;
}

std::span<const std::byte> Piece(std::span<const std::byte> image, uint32_t index) {
  const uint64_t begin = kImageHeaderBytes + uint64_t{index} * kImagePieceBytes;
  return image.subspan(begin, std::min<uint64_t>(kImagePieceBytes, image.size() - begin));
}

ImageHeader MakeHeader(const ChunkShape& shape, const ImageIdentity& identity) {
  ImageHeader header = {};
  header.magic = kMagic;
  header.version = kVersion;
  header.arrays = static_cast<uint32_t>(shape.arrays().size());
  header.job_id = identity.job_id;
  header.layout_fingerprint = identity.layout_fingerprint;
  header.worker = identity.worker;
  header.unit = identity.unit;
  header.first_grain = identity.first_grain;
  header.grains = identity.grains;
  header.chunk = identity.chunk;
  header.path = identity.path;
  header.offset = identity.offset;
  header.generation = identity.generation;
  header.attempt = identity.attempt;
  header.step = identity.step;
  header.payload_bytes = shape.payload_bytes();
  header.pieces = shape.pieces();
  header.piece_bytes = kImagePieceBytes;
  for (size_t i = 0; i < shape.arrays().size(); ++i) {
    const ChunkArray& array = shape.arrays()[i];
    header.array[i] = {static_cast<uint32_t>(array.kind), array.element_bytes, shape.offset(i),
                       array.bytes};
  }
  return header;
}

// Compares the fields of a header one after another; the first that differs is the message.
class Comparison {
 public:
  Comparison(const std::string& file, uint64_t offset) : file_(file), offset_(offset) {}

  Comparison& Same(std::string_view what, uint64_t found, uint64_t expected) {
    if (status_.ok() && found != expected) {
      status_ = CorruptAt(file_, offset_,
                          Std(absl::StrCat(Abs(what), " ", found, ", expected ", expected)));
    }
    return *this;
  }
  Comparison& SameId(std::string_view what, uint64_t found, uint64_t expected) {
    if (status_.ok() && found != expected) {
      status_ = CorruptAt(file_, offset_,
                          Std(absl::StrCat(Abs(what), " ", absl::Hex(found, absl::kZeroPad16),
                                           ", expected ", absl::Hex(expected, absl::kZeroPad16))));
    }
    return *this;
  }
  absl::Status status() const { return status_; }

 private:
  const std::string& file_;
  uint64_t offset_;
  absl::Status status_;
};

absl::Status CompareHeaders(const ImageHeader& found, const ImageHeader& expected,
                            const std::string& file) {
  Comparison fields(file, expected.offset);
  fields.SameId("an image of job", found.job_id, expected.job_id)
      .SameId("an image of layout", found.layout_fingerprint, expected.layout_fingerprint)
      .Same("misdirected, an image for path", found.path, expected.path)
      .Same("misdirected, an image for offset", found.offset, expected.offset)
      .Same("an image of worker", found.worker, expected.worker)
      .Same("an image of unit", found.unit, expected.unit)
      .Same("an image of chunk", found.chunk, expected.chunk)
      .Same("an image from grain", found.first_grain, expected.first_grain)
      .Same("an image with grains", found.grains, expected.grains)
      .Same("stale or lost write, an image of generation", found.generation, expected.generation)
      .Same("stale or lost write, an image of attempt", found.attempt, expected.attempt)
      .Same("stale or lost write, an image of step", found.step, expected.step)
      .Same("an image with arrays", found.arrays, expected.arrays)
      .Same("payload bytes", found.payload_bytes, expected.payload_bytes)
      .Same("pieces", found.pieces, expected.pieces)
      .Same("piece bytes", found.piece_bytes, expected.piece_bytes);
  for (uint32_t i = 0; i < kMaxImageArrays; ++i) {
    fields.Same("array kind", found.array[i].kind, expected.array[i].kind)
        .Same("array element bytes", found.array[i].element_bytes, expected.array[i].element_bytes)
        .Same("array offset", found.array[i].offset, expected.array[i].offset)
        .Same("array bytes", found.array[i].bytes, expected.array[i].bytes);
  }
  return fields.status();
}

// Format and checksum of the header block itself.
absl::StatusOr<ImageHeader> DecodeHeader(std::span<const std::byte> block, const std::string& file,
                                         uint64_t offset) {
  if (block.size() < kImageHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a header block of ", block.size(), " bytes, need ", kImageHeaderBytes));
  }
  ImageHeader header;
  std::memcpy(&header, block.data(), sizeof(header));
  if (header.magic != kMagic) {
    const bool empty = std::all_of(block.begin(), block.begin() + kImageHeaderBytes,
                                   [](std::byte b) { return b == std::byte{0}; });
    return CorruptAt(file, offset,
                     empty ? "no chunk image, only zeros: it was never written"
                           : "no chunk image: the magic number differs");
  }
  // A version that this code does not know may have its checksum elsewhere.
  ZS_RETURN_IF_ERROR(
      Comparison(file, offset).Same("chunk image of version", header.version, kVersion).status());
  ZS_RETURN_IF_ERROR(Comparison(file, offset)
                         .SameId("torn or flipped header, its checksum is", HeaderChecksum(block),
                                 StoredChecksum(block))
                         .status());
  return header;
}

absl::Status VerifyPieces(std::span<const std::byte> image, const ImageHeader& header,
                          const std::string& file, uint64_t offset) {
  uint32_t bad = 0;
  uint32_t first = 0;
  for (uint32_t i = header.pieces; i-- > 0;) {
    if (Xxh3_64(Piece(image, i)) == header.piece[i]) continue;
    ++bad;
    first = i;
  }
  if (bad == 0) return absl::OkStatus();
  const uint64_t at = offset + kImageHeaderBytes + uint64_t{first} * kImagePieceBytes;
  const char* kind = bad == 1 && header.pieces > 1 ? "flipped or torn" : "torn or flipped";
  return CorruptAt(
      file, at,
      Std(absl::StrCat(kind, " payload of the chunk image at offset ", offset, ": ", bad, " of ",
                       header.pieces, " pieces differ from their checksum, this is the first")));
}

void Zero(std::span<std::byte> image, uint64_t begin, uint64_t end) {
  std::memset(image.data() + begin, 0, end - begin);
}

}  // namespace

absl::StatusOr<ChunkShape> ChunkShape::Create(std::span<const ChunkArray> arrays) {
  if (arrays.empty() || arrays.size() > kMaxImageArrays) {
    return absl::InvalidArgumentError(
        absl::StrCat("a chunk of ", arrays.size(), " arrays; 1 to ", kMaxImageArrays));
  }
  constexpr uint64_t kMaxPayload = uint64_t{kMaxImagePieces} * kImagePieceBytes;
  ChunkShape shape;
  uint64_t end = kImageHeaderBytes;
  for (const ChunkArray& array : arrays) {
    if (array.bytes == 0 || array.element_bytes == 0 || array.bytes % array.element_bytes != 0 ||
        array.bytes > kMaxPayload) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a chunk array of ", array.bytes, " bytes with elements of ", array.element_bytes));
    }
    shape.arrays_.push_back(array);
    shape.offsets_.push_back(RoundUpTo(end, kImageArrayAlignment));
    end = shape.offsets_.back() + array.bytes;
  }
  shape.payload_bytes_ = end - kImageHeaderBytes;
  shape.image_bytes_ = RoundUpTo(end, kImageAlignment);
  if (shape.image_bytes_ - kImageHeaderBytes > kMaxPayload) {
    return absl::InvalidArgumentError(
        absl::StrCat("a chunk of ", shape.payload_bytes_, " bytes; at most ", kMaxPayload, " fit"));
  }
  return shape;
}

uint32_t ChunkShape::pieces() const {
  return static_cast<uint32_t>((image_bytes_ - kImageHeaderBytes + kImagePieceBytes - 1) /
                               kImagePieceBytes);
}

uint64_t EncodeChunkImage(std::span<std::byte> image, const ChunkShape& shape,
                          const ImageIdentity& identity) {
  ZS_CHECK(image.size() == shape.image_bytes(), "a buffer of another size than the image");
  for (size_t i = 0; i < shape.arrays().size(); ++i) {
    const bool last = i + 1 == shape.arrays().size();
    Zero(image, shape.offset(i) + shape.arrays()[i].bytes,
         last ? shape.image_bytes() : shape.offset(i + 1));
  }
  ImageHeader header = MakeHeader(shape, identity);
  for (uint32_t i = 0; i < header.pieces; ++i) header.piece[i] = Xxh3_64(Piece(image, i));
  Zero(image, 0, kImageHeaderBytes);
  std::memcpy(image.data(), &header, offsetof(ImageHeader, checksum));
  const uint64_t checksum = HeaderChecksum(image);
  std::memcpy(image.data() + kChecksumOffset, &checksum, sizeof(checksum));
  return checksum;
}

absl::Status VerifyChunkImage(std::span<const std::byte> image, const ChunkShape& shape,
                              const ExpectedImage& expected, const std::string& file) {
  const uint64_t offset = expected.identity.offset;
  if (image.size() != shape.image_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("a chunk image of ", image.size(), " bytes, ",
                                                   shape.image_bytes(), " expected"));
  }
  ZS_ASSIGN_OR_RETURN(const ImageHeader header, DecodeHeader(image, file, offset));
  ZS_RETURN_IF_ERROR(CompareHeaders(header, MakeHeader(shape, expected.identity), file));
  if (expected.checksum.has_value()) {
    ZS_RETURN_IF_ERROR(Comparison(file, offset)
                           .SameId("stale or lost write, an image with the checksum",
                                   StoredChecksum(image), *expected.checksum)
                           .status());
  }
  return VerifyPieces(image, header, file, offset);
}

absl::StatusOr<ImageIdentity> ReadImageIdentity(std::span<const std::byte> header,
                                                const std::string& file, uint64_t offset) {
  ZS_ASSIGN_OR_RETURN(const ImageHeader found, DecodeHeader(header, file, offset));
  ImageIdentity identity;
  identity.job_id = found.job_id;
  identity.layout_fingerprint = found.layout_fingerprint;
  identity.worker = found.worker;
  identity.unit = found.unit;
  identity.first_grain = found.first_grain;
  identity.grains = found.grains;
  identity.chunk = found.chunk;
  identity.path = found.path;
  identity.offset = found.offset;
  identity.generation = found.generation;
  identity.attempt = found.attempt;
  identity.step = found.step;
  return identity;
}

}  // namespace zeroshard
