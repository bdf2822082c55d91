// PartitionPlan: where each kind of state of one worker lies in its partition region, and how many
// bytes each kind takes.
//
// A pure value computed from the layout and the engine configuration, the same in the server (which
// makes the region and tells the ledger) and in the worker (which fills it). Immutable; any thread
// may read it.
//
// The region, every part aligned to 64 bytes:
//   PartitionHeader | undo area | put bitmap | accumulators | master | state 0 | state 1 |
//   scales 0 | scales 1 | shards
// Within each of the last seven, the worker's slices of the units follow one another without gaps.
// Format page: docs/partition.md.
#ifndef ZEROSHARD_STORAGE_PARTITION_H_
#define ZEROSHARD_STORAGE_PARTITION_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "storage/layout.h"
#include "storage/state_format.h"

namespace zeroshard {

inline constexpr uint64_t kPartitionMagic = 0x3154524150535aULL;  // "ZSPART1"
inline constexpr uint32_t kPartitionVersion = 2;
// Elements of a chunk unless sub_group_size asks for less.
inline constexpr uint64_t kMaxChunkElements = 64 * 1024;
// The same in jobs with a data plane, where launches should have enough to do.
inline constexpr uint64_t kMaxDeviceChunkElements = 512 * 1024;
inline constexpr uint32_t kMaxStates = 2;
inline constexpr uint64_t kAbsent = ~uint64_t{0};

struct PartitionHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t owner;  // worker, or rank of a local accumulator region
  uint64_t job_id;
  uint64_t layout_fingerprint;
  uint64_t bytes;
  uint64_t formatted;  // 1, written last
  uint64_t reserved[2];
};
static_assert(sizeof(PartitionHeader) == 64);

// One worker's part of one unit. Offsets are bytes in the region, kAbsent where the kind does not
// exist.
struct UnitPlan {
  GrainRange slice;  // grains whose optimizer state this worker holds; at stage 0 the whole unit
  GrainRange shard;  // grains whose parameters this worker is responsible for
  bool has_optimizer = false;
  bool resident = true;  // the parameters at rest lie in the window, not in a partition
  uint64_t accumulator = kAbsent;
  MasterForm master_form = MasterForm::kFloat32;
  // kFloat32: the fp32 master, absent where the fp32 parameter is its own; kSplit: the low halves;
  // kNone: in tiered jobs the parameters once more.
  uint64_t master = kAbsent;
  // An fp32 master that holds only what a split one could (stage 0 and tiered jobs, beside split
  // masters).
  bool canonical = false;
  uint64_t state[kMaxStates] = {kAbsent, kAbsent};
  uint64_t scales[kMaxStates] = {kAbsent, kAbsent};  // 8-bit states: one fp32 a block
  uint64_t first_block = 0;                          // of `slice` (storage/block_table.h)
  uint64_t blocks = 0;
  uint64_t shard_data = kAbsent;
  uint32_t first_chunk = 0;  // chunks of `slice`, consecutive
  uint32_t chunks = 0;
  uint64_t put_bit = 0;  // first of the unit's bits in the put bitmap, one a grain
};

// A run of whole grains of one unit that is computed and protected together.
struct ChunkPlan {
  uint32_t unit = 0;
  uint64_t begin = 0;  // first element within the unit
  uint64_t elements = 0;
};

// Bytes by kind of state, for the ledger.
struct PartitionBytes {
  uint64_t accumulator = 0;
  uint64_t master = 0;
  uint64_t state[kMaxStates] = {0, 0};  // with their scales
  uint64_t shards = 0;
  uint64_t records = 0;  // header, undo area, put bitmap, alignment
};

class PartitionPlan {
 public:
  // `lanes`: compute threads of the worker. InvalidArgument for worker >= layout.workers(), lanes
  // == 0, an unknown data type or format, more state slots than kMaxStates, or parameters without a
  // master at stage 0 (where replicas could not be kept).
  static absl::StatusOr<PartitionPlan> Create(const Layout& layout,
                                              const model::v1::EngineConfig& config,
                                              uint32_t worker, uint32_t lanes);
  // One rank's local accumulators (stage 1 with several micro-steps): the same kind of region with
  // fp32 accumulators of whole trainable units and nothing else.
  static absl::StatusOr<PartitionPlan> CreateLocal(const Layout& layout,
                                                   const model::v1::EngineConfig& config,
                                                   uint32_t lanes);

  const UnitPlan& unit(uint32_t unit) const { return units_[unit]; }
  std::span<const ChunkPlan> chunks() const { return chunks_; }
  uint32_t state_slots() const { return state_slots_; }
  StateFormat state_format() const { return state_format_; }
  uint64_t bytes() const { return bytes_; }  // of the whole region, a multiple of 4096
  uint64_t undo_offset() const { return undo_offset_; }
  uint64_t undo_bytes() const { return undo_bytes_; }
  uint64_t put_bitmap_offset() const { return put_bitmap_offset_; }
  const PartitionBytes& totals() const { return totals_; }
  uint64_t chunk_elements() const { return chunk_elements_; }

 private:
  PartitionPlan() = default;
  void PlanUnits(const Layout& layout, const model::v1::EngineConfig& config, uint32_t worker);
  void PlanChunks(UnitPlan& plan, uint32_t unit);
  void PlaceSections(const Layout& layout, const model::v1::EngineConfig& config);
  void PlaceStates(uint64_t& offset);
  // Places the header, the undo area and the put bitmap of so many bits; returns the offset after
  // them.
  uint64_t PlaceRecords(uint64_t put_bits);
  // Takes room for `elements`, adds it to `total`, and returns where it is.
  static uint64_t Place(uint64_t& offset, uint64_t bytes, uint64_t& total);
  // The same for a unit's part of what may leave memory: such parts share no pages.
  uint64_t PlaceState(uint64_t& offset, uint64_t bytes, uint64_t& total) const;

  std::vector<UnitPlan> units_;
  std::vector<ChunkPlan> chunks_;
  uint32_t state_slots_ = 0;
  StateFormat state_format_ = StateFormat::kFloat32;
  uint32_t lanes_ = 1;
  uint64_t chunk_elements_ = kMaxChunkElements;
  uint64_t section_alignment_ = 1;
  uint64_t bytes_ = 0;
  uint64_t undo_offset_ = 0;
  uint64_t undo_bytes_ = 0;
  uint64_t put_bitmap_offset_ = 0;
  PartitionBytes totals_;
};

// Bytes of one element of a state array, without scales.
constexpr uint64_t StateElementBytes(StateFormat format) {
  return format == StateFormat::kFloat32 ? 4 : format == StateFormat::kBfloat16 ? 2 : 1;
}

// Bytes of one element of an array of masters.
constexpr uint64_t MasterElementBytes(MasterForm form) {
  return form == MasterForm::kFloat32 ? 4 : 2;
}

// Whether ranks accumulate micro-steps on their own before the ranks are summed: stage 1 with
// several micro-steps, unless ranks_first.
bool SumsMicroStepsFirst(const model::v1::EngineConfig& config);

// Where parameters of a job with a data plane rest: on the devices; all in the window of the host,
// as in place; on the NVMe tier, but for units that stay gathered, which are in that window.
bool HasDeviceParameters(const model::v1::EngineConfig& config);
bool HasHostParameters(const model::v1::EngineConfig& config);
bool HasNvmeParameters(const model::v1::EngineConfig& config);

// Whether every rank has a local accumulator region for it; with a data plane it sums in memory of
// its own.
bool UsesLocalAccumulators(const model::v1::EngineConfig& config);

// Bytes of one rank's gradient window: all trainable units, bounded by reduce_bucket_size (two of
// the largest units at least), and large enough to put frozen units in pieces. With a data plane it
// carries puts alone. A multiple of 4096.
uint64_t GradientWindowBytes(const Layout& layout, const model::v1::EngineConfig& config);

// What comes behind it in the same region where parameters of a data plane rest on the NVMe tier:
// the ring through which the home worker hands its shards to the rank, each from a multiple of
// kParameterRingAlignment on. Room for the shards that are gathered ahead and two more; 0 in other
// jobs. A multiple of 4096.
inline constexpr uint64_t kParameterRingAlignment = 256;
uint64_t ParameterRingBytes(const Layout& layout, const model::v1::EngineConfig& config);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_PARTITION_H_
