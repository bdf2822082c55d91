// sources: storage/chunk_image.cc storage/nvme_manifest.cc storage/slot_table.cc
// sources: storage/extent_file.cc storage/nvme_path.cc storage/file_system_kind.cc
// sources: storage/file_io.cc storage/named_dir.cc base/checksum.cc base/fault_point.cc
// sources: base/random_token.cc base/check.cc base/status.cc base/unique_fd.cc
// libs: absl_status absl_statusor absl_strings absl_str_format absl_time -lxxhash
// seeds: tests/fuzz/seeds/nvme

// What the NVMe tier reads from drives and finds in its region: a chunk image, a manifest, the
// superblock of an extent file, a slot table. The first byte chooses which; the rest edits a
// well-formed one, whose checksum is then made right, because no fuzzer guesses one. Whatever is
// accepted is consistent: an image is the expected one, a manifest encodes again, a table can be
// worked with.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/checksum.h"
#include "base/unique_fd.h"
#include "storage/chunk_image.h"
#include "storage/extent_file.h"
#include "storage/file_io.h"
#include "storage/nvme_manifest.h"
#include "storage/slot_table.h"

namespace zeroshard {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

// Each 4 bytes: position (16 bits), operation, operand.
void Edit(std::span<std::byte> bytes, std::string_view edits) {
  for (size_t i = 0; i + 4 <= edits.size(); i += 4) {
    const auto byte = [&](size_t k) { return static_cast<uint8_t>(edits[i + k]); };
    const size_t at = (byte(0) | byte(1) << 8) % bytes.size();
    if (byte(2) % 2 == 0) {
      bytes[at] ^= std::byte{byte(3)};
    } else {
      std::memset(&bytes[at], byte(3), std::min<size_t>(8, bytes.size() - at));
    }
  }
}

void Seal(std::span<std::byte> bytes, size_t checksum_at) {
  const uint64_t checksum = Xxh3_64(bytes.first(checksum_at));
  std::memcpy(&bytes[checksum_at], &checksum, sizeof(checksum));
}

void RunImage(std::string_view edits) {
  const ChunkShape shape = *ChunkShape::Create(
      std::vector<ChunkArray>{{ChunkArrayKind::kMaster, 4, 2048}, {ChunkArrayKind::kState0, 1, 5}});
  const ImageIdentity identity{.job_id = 1, .layout_fingerprint = 2, .grains = 2, .offset = 4096};
  std::vector<std::byte> image(shape.image_bytes());
  const uint64_t checksum = EncodeChunkImage(image, shape, identity);
  const std::vector<std::byte> original = image;
  Edit(image, edits);
  Seal(image, kImageHeaderBytes - 8);
  const auto found = ReadImageIdentity(image, "file", 4096);
  if (VerifyChunkImage(image, shape, {identity, checksum}, "file").ok()) {
    Require(image == original);
  }
  if (VerifyChunkImage(image, shape, {identity, std::nullopt}, "file").ok()) {
    Require(found.ok() && *found == identity);
  }
}

void RunManifest(std::string_view edits) {
  const ManifestIdentity identity{.job_id = 1, .worker = 2, .chunks = 3, .max_extra = 50};
  const NvmeManifest manifest{1, 2, 3, 4, 5, std::vector<SlotImage>(3), "extra"};
  std::string copy = *EncodeManifest(identity, manifest);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(copy.data(), copy.size()));
  Edit(bytes, edits);
  Seal(bytes, 504);
  auto decoded = DecodeManifest(copy, identity, "file", 0);
  if (!decoded.ok()) return;
  Require(decoded->images.size() == 3 && decoded->extra.size() <= 50);
  auto again = EncodeManifest(identity, *decoded);
  Require(again.ok() && *DecodeManifest(*again, identity, "file", 0) == *decoded);
}

void RunSuperblock(std::string_view edits) {
  static const UniqueFd kFile(::memfd_create("superblock", MFD_CLOEXEC));
  std::vector<std::byte> block(4096);
  std::memcpy(block.data(), "ZSEXTNT1\1", 9);
  Edit(block, edits);
  Seal(block, 4088);
  Require(WriteAllAt(kFile.get(), block, 0, "memfd").ok());
  static_cast<void>(ReadExtentIdentity(kFile.get(), "memfd").ok());
}

void RunTable(std::string_view edits) {
  constexpr SlotTableShape shape{.chunks = 2, .slots = 6, .job_id = 1};
  alignas(64) static std::byte memory[1024];
  const std::span<std::byte> region(memory);
  auto made = SlotTable::Format(region, shape, 1, 0);
  Require(made.ok() && made->Begin(1).ok());
  for (uint32_t chunk : {0, 1}) {
    Require(made->Complete(chunk, {*made->Reserve(chunk), 1, 1, 1, 1}).ok());
  }
  Require(made->Commit(1).ok() && made->Begin(2).ok() && made->Reserve(0).ok());
  Edit(region.first(SlotTable::Bytes(2, 6)), edits);
  auto table = SlotTable::Adopt(region, shape);
  if (!table.ok()) return;
  const uint64_t attempt = table->committed() + 1;
  Require(table->Begin(attempt).ok());
  for (uint32_t chunk : {0, 1}) {
    auto slot = table->Prepared(chunk).has_value()
                    ? absl::StatusOr<uint32_t>(absl::AbortedError(""))
                    : table->Reserve(chunk);
    if (!slot.ok()) continue;
    const SlotImage image{*slot, table->generation(), attempt, 5, 5};
    Require(table->Complete(chunk, image).ok());
    Require(table->Prepared(chunk) == image);
  }
  Require(table->Commit(attempt).ok());
  Require(table->ReleaseDrained() <= 6);
}

void Run(std::string_view input) {
  if (input.empty()) return;
  const std::string_view edits = input.substr(1);
  switch (static_cast<uint8_t>(input[0]) % 4) {
    case 0:
      return RunImage(edits);
    case 1:
      return RunManifest(edits);
    case 2:
      return RunSuperblock(edits);
    default:
      return RunTable(edits);
  }
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  zeroshard::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
