#include "storage/chunk_image.h"

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr ImageIdentity kIdentity{.job_id = 0x1122334455667788,
                                  .layout_fingerprint = 99,
                                  .worker = 3,
                                  .unit = 7,
                                  .first_grain = 20,
                                  .grains = 4,
                                  .chunk = 12,
                                  .path = 1,
                                  .offset = 40960,
                                  .generation = 5,
                                  .attempt = 17,
                                  .step = 16};

ChunkShape Shape(std::vector<ChunkArray> arrays) {
  auto shape = ChunkShape::Create(arrays);
  EXPECT_TRUE(shape.ok()) << shape.status();
  return *std::move(shape);
}

// Two full pieces and a short one; the second array ends in the middle of a line.
ChunkShape AdamShape() {
  return Shape({{ChunkArrayKind::kMaster, 4, 100000},
                {ChunkArrayKind::kState0, 1, 4097},
                {ChunkArrayKind::kScales0, 4, 36000}});
}

struct Image {
  explicit Image(const ChunkShape& shape, const ImageIdentity& identity = kIdentity)
      : bytes(shape.image_bytes(), std::byte{0xee}) {
    for (size_t i = 0; i < shape.arrays().size(); ++i) {
      for (uint64_t b = 0; b < shape.arrays()[i].bytes; ++b) {
        bytes[shape.offset(i) + b] = std::byte(b * 31 + i * 7);
      }
    }
    checksum = EncodeChunkImage(bytes, shape, identity);
  }
  std::vector<std::byte> bytes;
  uint64_t checksum = 0;
};

std::string Message(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  return std::string(status.message());
}

TEST(ChunkImageTest, ArraysLieWhereTheShapeSays) {
  const ChunkShape shape = AdamShape();
  EXPECT_EQ(shape.offset(0), 4096u);
  EXPECT_EQ(shape.offset(1), 104128u) << "100000 rounded to 64 after the header";
  EXPECT_EQ(shape.offset(2), 108288u);
  EXPECT_EQ(shape.payload_bytes(), 108288u + 36000 - 4096);
  EXPECT_EQ(shape.image_bytes(), 147456u);
  EXPECT_EQ(shape.pieces(), 3u);
  // The example of docs/nvme.md.
  const ChunkShape small = Shape({{ChunkArrayKind::kMaster, 4, 2048},
                                  {ChunkArrayKind::kState0, 4, 2048},
                                  {ChunkArrayKind::kState1, 4, 2048}});
  EXPECT_EQ(small.payload_bytes(), 6144u);
  EXPECT_EQ(small.image_bytes(), 12288u);
}

TEST(ChunkImageTest, ShapesThatDoNotFitAreRefused) {
  using Kind = ChunkArrayKind;
  const std::vector<std::vector<ChunkArray>> bad = {
      {},
      {{Kind::kMaster, 4, 0}},
      {{Kind::kMaster, 0, 8}},
      {{Kind::kMaster, 4, 6}},
      {{Kind::kMaster, 4, uint64_t{kMaxImagePieces} * kImagePieceBytes + 4}},
      {{Kind::kMaster, 4, uint64_t{kMaxImagePieces} * kImagePieceBytes}, {Kind::kState0, 4, 4}},
      std::vector<ChunkArray>(kMaxImageArrays + 1, {Kind::kMaster, 4, 4})};
  for (const auto& arrays : bad) {
    EXPECT_EQ(ChunkShape::Create(arrays).status().code(), absl::StatusCode::kInvalidArgument)
        << arrays.size();
  }
  const auto largest = ChunkShape::Create(
      std::vector<ChunkArray>{{Kind::kMaster, 4, uint64_t{kMaxImagePieces} * kImagePieceBytes}});
  ASSERT_TRUE(largest.ok()) << largest.status();
  EXPECT_EQ(largest->pieces(), kMaxImagePieces);
}

TEST(ChunkImageTest, EncodingLeavesTheArraysAndZeroesAllElse) {
  const ChunkShape shape = AdamShape();
  const Image image(shape);
  EXPECT_TRUE(VerifyChunkImage(image.bytes, shape, {kIdentity, image.checksum}, "f").ok());
  EXPECT_TRUE(VerifyChunkImage(image.bytes, shape, {kIdentity, std::nullopt}, "f").ok());
  for (size_t i = 0; i < 3; ++i) {
    const uint64_t end = shape.offset(i) + shape.arrays()[i].bytes;
    EXPECT_EQ(image.bytes[end - 1], std::byte((shape.arrays()[i].bytes - 1) * 31 + i * 7));
    const uint64_t next = i == 2 ? shape.image_bytes() : shape.offset(i + 1);
    for (uint64_t b = end; b < next; ++b) ASSERT_EQ(image.bytes[b], std::byte{0}) << b;
  }
  auto identity = ReadImageIdentity(image.bytes, "f", 0);
  ASSERT_TRUE(identity.ok()) << identity.status();
  EXPECT_EQ(*identity, kIdentity);
}

TEST(ChunkImageTest, NoFlippedBitGoesUnnoticed) {
  const ChunkShape shape = Shape({{ChunkArrayKind::kMaster, 4, 5000}});
  Image image(shape);
  for (size_t byte = 0; byte < image.bytes.size(); ++byte) {
    const auto bit = std::byte(1 << byte % 8);
    image.bytes[byte] ^= bit;
    ASSERT_EQ(VerifyChunkImage(image.bytes, shape, {kIdentity, std::nullopt}, "f").code(),
              absl::StatusCode::kDataLoss)
        << byte;
    image.bytes[byte] ^= bit;
  }
  EXPECT_TRUE(VerifyChunkImage(image.bytes, shape, {kIdentity, image.checksum}, "f").ok());
}

TEST(ChunkImageTest, EveryFieldOfTheIdentityIsComparedAndNamed) {
  struct Case {
    std::function<void(ImageIdentity&)> change;
    const char* message;
  };
  const std::vector<Case> cases = {
      {[](ImageIdentity& i) { i.job_id = 1; },
       "an image of job 0000000000000001, expected 1122334455667788"},
      {[](ImageIdentity& i) { i.layout_fingerprint = 1; }, "an image of layout 0000000000000001"},
      {[](ImageIdentity& i) { i.worker = 1; }, "an image of worker 1, expected 3"},
      {[](ImageIdentity& i) { i.unit = 1; }, "an image of unit 1, expected 7"},
      {[](ImageIdentity& i) { i.first_grain = 1; }, "an image from grain 1, expected 20"},
      {[](ImageIdentity& i) { i.grains = 1; }, "an image with grains 1, expected 4"},
      {[](ImageIdentity& i) { i.chunk = 1; }, "an image of chunk 1, expected 12"},
      {[](ImageIdentity& i) { i.path = 0; }, "misdirected, an image for path 0, expected 1"},
      {[](ImageIdentity& i) { i.offset = 8192; },
       "misdirected, an image for offset 8192, expected 40960"},
      {[](ImageIdentity& i) { i.generation = 4; },
       "stale or lost write, an image of generation 4, expected 5"},
      {[](ImageIdentity& i) { i.attempt = 16; },
       "stale or lost write, an image of attempt 16, expected 17"},
      {[](ImageIdentity& i) { i.step = 15; },
       "stale or lost write, an image of step 15, expected 16"}};
  const ChunkShape shape = AdamShape();
  for (const Case& test : cases) {
    ImageIdentity other = kIdentity;
    test.change(other);
    const Image image(shape, other);
    const std::string message =
        Message(VerifyChunkImage(image.bytes, shape, {kIdentity, std::nullopt}, "/d/file"));
    EXPECT_THAT(message, HasSubstr("/d/file at offset 40960: "));
    EXPECT_THAT(message, HasSubstr(test.message));
  }
}

TEST(ChunkImageTest, AWholeImageThatIsNotTheOneIsFound) {
  const ChunkShape shape = AdamShape();
  const Image image(shape);
  Image other = image;
  other.bytes[shape.offset(0)] ^= std::byte{1};
  const uint64_t checksum = EncodeChunkImage(other.bytes, shape, kIdentity);
  EXPECT_NE(checksum, image.checksum) << "the header's checksum stands for the payload";
  EXPECT_THAT(Message(VerifyChunkImage(other.bytes, shape, {kIdentity, image.checksum}, "f")),
              HasSubstr("stale or lost write, an image with the checksum"));
}

TEST(ChunkImageTest, ArraysOfAnotherShapeAreNamed) {
  const Image image(Shape({{ChunkArrayKind::kMaster, 4, 8192}}));
  const std::vector<std::pair<ChunkShape, const char*>> cases = {
      {Shape({{ChunkArrayKind::kMaster, 2, 8192}}), "array element bytes 4, expected 2"},
      {Shape({{ChunkArrayKind::kState0, 4, 8192}}), "array kind 1, expected 2"},
      {Shape({{ChunkArrayKind::kMaster, 4, 8188}}), "payload bytes 8192, expected 8188"},
      {Shape({{ChunkArrayKind::kMaster, 4, 4096}, {ChunkArrayKind::kState0, 4, 4096}}),
       "an image with arrays 1, expected 2"}};
  for (const auto& [shape, message] : cases) {
    ASSERT_EQ(shape.image_bytes(), image.bytes.size());
    EXPECT_THAT(Message(VerifyChunkImage(image.bytes, shape, {kIdentity, std::nullopt}, "f")),
                HasSubstr(message));
  }
}

TEST(ChunkImageTest, EveryTornMixtureOfTwoImagesIsFound) {
  const ChunkShape shape = Shape({{ChunkArrayKind::kMaster, 4, 4096}});
  ImageIdentity next = kIdentity;
  next.attempt += 1;
  next.step += 1;
  Image older(shape);
  Image newer(shape);
  for (uint64_t b = 4096; b < 8192; ++b) newer.bytes[b] ^= std::byte{0x5a};
  newer.checksum = EncodeChunkImage(newer.bytes, shape, next);
  constexpr uint32_t sectors = 16;
  for (uint32_t mask = 0; mask < 1u << sectors; ++mask) {
    std::vector<std::byte> torn = older.bytes;
    uint32_t same = 0;  // sectors that do not differ
    for (uint32_t s = 0; s < sectors; ++s) {
      const bool differs = std::memcmp(&older.bytes[s * 512], &newer.bytes[s * 512], 512) != 0;
      same |= differs ? 0 : 1u << s;
      if ((mask >> s & 1) != 0) std::memcpy(&torn[s * 512], &newer.bytes[s * 512], 512);
    }
    const bool whole = (mask | same) == (1u << sectors) - 1;
    ASSERT_EQ(VerifyChunkImage(torn, shape, {next, newer.checksum}, "f").ok(), whole) << mask;
    ASSERT_EQ(VerifyChunkImage(torn, shape, {next, std::nullopt}, "f").ok(), whole) << mask;
  }
}

TEST(ChunkImageTest, MessagesTellWhatHappened) {
  const ChunkShape shape = AdamShape();
  const ExpectedImage expected{kIdentity, std::nullopt};
  const Image image(shape);

  std::vector<std::byte> bytes(shape.image_bytes());
  EXPECT_THAT(Message(VerifyChunkImage(bytes, shape, expected, "f")),
              HasSubstr("f at offset 40960: no chunk image, only zeros: it was never written"));
  bytes[100] = std::byte{1};
  EXPECT_THAT(Message(VerifyChunkImage(bytes, shape, expected, "f")),
              HasSubstr("the magic number differs"));

  bytes = image.bytes;
  bytes[8] = std::byte{2};
  EXPECT_THAT(Message(VerifyChunkImage(bytes, shape, expected, "f")),
              HasSubstr("chunk image of version 2, expected 1"));
  EXPECT_FALSE(ReadImageIdentity(bytes, "f", 0).ok());

  bytes = image.bytes;
  bytes[4000] ^= std::byte{1};
  EXPECT_THAT(Message(VerifyChunkImage(bytes, shape, expected, "f")),
              HasSubstr("torn or flipped header"));

  bytes = image.bytes;
  bytes[4096 + 65536 + 5] ^= std::byte{1};
  EXPECT_THAT(Message(VerifyChunkImage(bytes, shape, expected, "f")),
              HasSubstr("f at offset 110592: flipped or torn payload of the chunk image at offset "
                        "40960: 1 of 3 pieces"));
  bytes[4096 + 2 * 65536] ^= std::byte{1};
  EXPECT_THAT(Message(VerifyChunkImage(bytes, shape, expected, "f")),
              HasSubstr("torn or flipped payload of the chunk image at offset 40960: 2 of 3"));
}

TEST(ChunkImageTest, ABufferOfAnotherSizeIsTheCallersMistake) {
  const ChunkShape shape = AdamShape();
  const Image image(shape);
  EXPECT_EQ(
      VerifyChunkImage(std::span(image.bytes).first(4096), shape, {kIdentity, {}}, "f").code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadImageIdentity(std::span(image.bytes).first(512), "f", 0).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace zeroshard
