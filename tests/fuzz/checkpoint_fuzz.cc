// sources: storage/shard_format.cc storage/record_map.cc storage/layout.cc storage/utf8.cc
// sources: storage/file_io.cc base/checksum.cc base/fault_point.cc base/status.cc
// libs: absl_status absl_statusor absl_strings absl_str_format absl_time -lxxhash
// seeds: tests/fuzz/seeds/checkpoint

// Any bytes as the parts of a checkpoint whose checksums hold: decoders refuse them, or what they
// give lies within the file and the layout, and encodes to the same meaning.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "storage/layout.h"
#include "storage/record_map.h"
#include "storage/shard_format.h"

namespace zeroshard {
namespace {

constexpr char kPath[] = "fuzz";
constexpr uint64_t kIndexOffset = 1 << 20;

void Require(bool condition) {
  if (!condition) std::abort();
}

Layout SmallLayout() {
  ParameterSpec spec;
  spec.name = "w";
  spec.shape = {20 * kGrainElements};
  return *Layout::Create({spec}, 1);
}

void CheckCoverage(const RecordMap& map, GrainRange range) {
  const auto places = map.Cover(0, "master", range);
  if (!places.ok() || range.size() == 0) return;
  uint64_t next = range.begin;
  for (const RecordPlace& place : *places) {
    Require(place.record.grains.begin <= next && place.record.grains.end > next);
    next = place.record.grains.end;
  }
  Require(next >= range.end);
}

void CheckIndex(std::string_view bytes) {
  const auto records = shard_format::DecodeIndex(bytes, kIndexOffset, kPath);
  if (!records.ok()) return;
  for (const ShardRecord& record : *records) {
    Require(record.offset + record.bytes <= kIndexOffset);
    Require(record.bytes == record.grains.size() * record.type.grain_bytes());
  }
  const std::string encoded = shard_format::EncodeIndex(*records);
  Require(shard_format::DecodeIndex(encoded, kIndexOffset, kPath).ok());
  static const Layout kLayout = SmallLayout();
  RecordMap map;
  if (!map.Add(0, *records, kLayout, kPath).ok() || !map.Seal().ok()) return;
  for (uint64_t begin = 0; begin < 20; begin += 3) CheckCoverage(map, {begin, begin + 4});
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace zeroshard;  // NOLINT(google-build-using-namespace)
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  CheckIndex(bytes);
  static_cast<void>(shard_format::DecodeHeader(bytes, kPath).ok());
  static_cast<void>(shard_format::DecodeCommit(bytes, kPath).ok());
  if (size >= shard_format::kFooterBytes) {
    const uint64_t file_bytes = size + 4096;
    const auto footer = shard_format::DecodeFooter(bytes.substr(size - shard_format::kFooterBytes),
                                                   file_bytes, kPath);
    Require(!footer.ok() || footer->index_offset <= file_bytes);
  }
  return 0;
}
