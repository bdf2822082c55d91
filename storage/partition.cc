#include "storage/partition.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "storage/block_table.h"
#include "storage/bytes.h"
#include "storage/layout_proto.h"
#include "storage/undo_area.h"

namespace zeroshard {
namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kPage = 4096;
// Frozen units are put in pieces of at least this much.
constexpr uint64_t kMinGradientWindow = uint64_t{1} << 20;
// Where gradients go over the device: room to put parameters.
constexpr uint64_t kMaxPutWindow = uint64_t{64} << 20;

uint64_t ChunkElements(const model::v1::EngineConfig& config) {
  const uint64_t most = config.data_plane() ? kMaxDeviceChunkElements : kMaxChunkElements;
  const uint64_t asked = config.sub_group_elements() == 0 ? most : config.sub_group_elements();
  return std::clamp(RoundUpTo(asked, kGrainElements), kGrainElements, most);
}

absl::StatusOr<StateFormat> StateFormatOf(const model::v1::EngineConfig& config) {
  switch (config.state_format()) {
    case model::v1::STATE_FORMAT_FLOAT32:
      return StateFormat::kFloat32;
    case model::v1::STATE_FORMAT_BFLOAT16:
      return StateFormat::kBfloat16;
    case model::v1::STATE_FORMAT_INT8:
      return StateFormat::kInt8;
    default:
      return absl::InvalidArgumentError(absl::StrCat("state format ", config.state_format()));
  }
}

absl::Status CheckMasterForm(const model::v1::EngineConfig& config) {
  if (!model::v1::MasterForm_IsValid(config.master_form())) {
    return absl::InvalidArgumentError(absl::StrCat("master form ", config.master_form()));
  }
  if (config.master_form() == model::v1::MASTER_FORM_NONE && config.stage() == 0) {
    return absl::InvalidArgumentError(
        "parameters without a master need stage 1, 2 or 3: at stage 0 every worker updates a whole "
        "replica");
  }
  return absl::OkStatus();
}

// Whether masters are arrays of their own beside the parameters, whole whatever the configured
// form: where several workers update replicas, and where an update must be repeatable from what was
// read.
bool KeepsMastersBeside(const model::v1::EngineConfig& config) {
  return config.stage() == 0 || config.tiered();
}

// Of a unit with optimizer states. Only bf16 parameters have anything but an fp32 master.
MasterForm MasterFormOf(const Unit& unit, const model::v1::EngineConfig& config) {
  if (unit.dtype != DType::kBfloat16) return MasterForm::kFloat32;
  switch (config.master_form()) {
    case model::v1::MASTER_FORM_SPLIT:
      return KeepsMastersBeside(config) ? MasterForm::kFloat32 : MasterForm::kSplit;
    case model::v1::MASTER_FORM_NONE:
      return MasterForm::kNone;
    default:
      return MasterForm::kFloat32;
  }
}

}  // namespace

absl::StatusOr<PartitionPlan> PartitionPlan::Create(const Layout& layout,
                                                    const model::v1::EngineConfig& config,
                                                    uint32_t worker, uint32_t lanes) {
  if (worker >= layout.workers() || lanes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", worker, " of ", layout.workers(), " with ", lanes, " lanes"));
  }
  if (config.state_slots_size() > static_cast<int>(kMaxStates)) {
    return absl::InvalidArgumentError(
        absl::StrCat(config.state_slots_size(), " state slots; at most ", kMaxStates));
  }
  if (auto dtype = DTypeFromProto(config.accumulator_dtype()); !dtype.ok()) return dtype.status();
  ZS_RETURN_IF_ERROR(CheckMasterForm(config));
  PartitionPlan plan;
  ZS_ASSIGN_OR_RETURN(plan.state_format_, StateFormatOf(config));
  plan.state_slots_ = config.state_slots_size();
  plan.lanes_ = lanes;
  plan.chunk_elements_ = ChunkElements(config);
  plan.section_alignment_ = config.tiered() ? kPage : 1;
  plan.PlanUnits(layout, config, worker);
  plan.PlaceSections(layout, config);
  return plan;
}

absl::StatusOr<PartitionPlan> PartitionPlan::CreateLocal(const Layout& layout,
                                                         const model::v1::EngineConfig& config,
                                                         uint32_t lanes) {
  if (lanes == 0) return absl::InvalidArgumentError("0 lanes");
  PartitionPlan plan;
  plan.lanes_ = lanes;
  plan.chunk_elements_ = ChunkElements(config);
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    UnitPlan unit;
    unit.has_optimizer = layout.units()[u].trainable;
    if (unit.has_optimizer) unit.slice = {0, layout.units()[u].grains};
    plan.PlanChunks(unit, u);
    plan.units_.push_back(unit);
  }
  uint64_t offset = plan.PlaceRecords(0);
  for (UnitPlan& unit : plan.units_) {
    if (!unit.has_optimizer) continue;
    unit.accumulator =
        Place(offset, unit.slice.elements() * sizeof(float), plan.totals_.accumulator);
  }
  plan.bytes_ = RoundUpTo(offset, kPage);
  plan.totals_.records = plan.bytes_ - plan.totals_.accumulator;
  return plan;
}

void PartitionPlan::PlanUnits(const Layout& layout, const model::v1::EngineConfig& config,
                              uint32_t worker) {
  const bool copied = config.window() == model::v1::WINDOW_COPY;
  uint64_t put_bit = 0;
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const Unit& unit = layout.units()[u];
    UnitPlan plan;
    plan.shard = layout.slice(u, worker);
    plan.has_optimizer = unit.trainable && !config.forward_only();
    plan.resident =
        !copied || ((!config.data_plane() || HasNvmeParameters(config)) &&
                    (config.stage() < 3 || layout.persistent(u, config.persistence_threshold())));
    if (plan.has_optimizer) {
      plan.slice = config.stage() == 0 ? GrainRange{0, unit.grains} : plan.shard;
      plan.master_form = MasterFormOf(unit, config);
      plan.canonical = unit.dtype == DType::kBfloat16 && KeepsMastersBeside(config) &&
                       config.master_form() == model::v1::MASTER_FORM_SPLIT;
      if (state_format_ == StateFormat::kInt8) {
        plan.first_block = FirstBlock(layout, u, plan.slice.begin);
        plan.blocks = FirstBlock(layout, u, plan.slice.end) - plan.first_block;
      }
    }
    plan.put_bit = put_bit;
    put_bit += unit.grains;
    PlanChunks(plan, u);
    units_.push_back(plan);
  }
}

void PartitionPlan::PlanChunks(UnitPlan& plan, uint32_t unit) {
  plan.first_chunk = static_cast<uint32_t>(chunks_.size());
  for (uint64_t done = 0; done < plan.slice.elements(); done += chunk_elements_) {
    chunks_.push_back({.unit = unit,
                       .begin = plan.slice.first_element() + done,
                       .elements = std::min(chunk_elements_, plan.slice.elements() - done)});
  }
  plan.chunks = static_cast<uint32_t>(chunks_.size()) - plan.first_chunk;
}

uint64_t PartitionPlan::PlaceRecords(uint64_t put_bits) {
  undo_offset_ = sizeof(PartitionHeader);
  undo_bytes_ = UndoArea::BytesNeeded(lanes_, std::max<uint32_t>(1, chunks_.size()));
  put_bitmap_offset_ = RoundUpTo(undo_offset_ + undo_bytes_, kLine);
  return RoundUpTo(put_bitmap_offset_ + RoundUpTo(put_bits, 64) / 8, kLine);
}

uint64_t PartitionPlan::Place(uint64_t& offset, uint64_t bytes, uint64_t& total) {
  const uint64_t at = offset;
  offset += bytes;
  total += bytes;
  return at;
}

uint64_t PartitionPlan::PlaceState(uint64_t& offset, uint64_t bytes, uint64_t& total) const {
  offset = RoundUpTo(offset, section_alignment_);
  return Place(offset, bytes, total);
}

void PartitionPlan::PlaceSections(const Layout& layout, const model::v1::EngineConfig& config) {
  // Every slice is a whole number of grains, so every part but the scales is a multiple of 256
  // bytes.
  uint64_t grains = 0;
  for (const Unit& unit : layout.units()) grains += unit.grains;
  uint64_t offset = PlaceRecords(grains);
  const uint64_t accumulator_bytes = SizeOf(*DTypeFromProto(config.accumulator_dtype()));
  for (UnitPlan& unit : units_) {
    if (!unit.has_optimizer) continue;
    unit.accumulator =
        Place(offset, unit.slice.elements() * accumulator_bytes, totals_.accumulator);
  }
  for (uint32_t u = 0; u < units_.size(); ++u) {
    UnitPlan& unit = units_[u];
    if (!unit.has_optimizer) continue;
    // fp32 parameters, and those without a master, are their own.
    const bool own =
        layout.units()[u].dtype == DType::kFloat32 || unit.master_form == MasterForm::kNone;
    if (own && !KeepsMastersBeside(config)) continue;
    unit.master = PlaceState(offset, unit.slice.elements() * MasterElementBytes(unit.master_form),
                             totals_.master);
  }
  PlaceStates(offset);
  for (uint32_t u = 0; u < units_.size(); ++u) {
    if (units_[u].resident) continue;
    units_[u].shard_data = PlaceState(
        offset, units_[u].shard.elements() * SizeOf(layout.units()[u].dtype), totals_.shards);
  }
  bytes_ = RoundUpTo(offset, kPage);
  totals_.records = bytes_ - totals_.accumulator - totals_.master - totals_.state[0] -
                    totals_.state[1] - totals_.shards;
}

void PartitionPlan::PlaceStates(uint64_t& offset) {
  for (uint32_t slot = 0; slot < state_slots_; ++slot) {
    for (UnitPlan& unit : units_) {
      if (!unit.has_optimizer) continue;
      unit.state[slot] = PlaceState(
          offset, unit.slice.elements() * StateElementBytes(state_format_), totals_.state[slot]);
    }
  }
  for (uint32_t slot = 0; slot < state_slots_ && state_format_ == StateFormat::kInt8; ++slot) {
    for (UnitPlan& unit : units_) {
      if (!unit.has_optimizer) continue;
      unit.scales[slot] = PlaceState(offset, unit.blocks * sizeof(float), totals_.state[slot]);
    }
    offset = RoundUpTo(offset, kLine);
  }
}

bool SumsMicroStepsFirst(const model::v1::EngineConfig& config) {
  return config.stage() == 1 && config.accumulation_steps() > 1 && !config.ranks_first() &&
         !config.forward_only();
}

bool HasDeviceParameters(const model::v1::EngineConfig& config) {
  return config.data_plane() && !HasHostParameters(config) && !HasNvmeParameters(config);
}

bool HasHostParameters(const model::v1::EngineConfig& config) {
  return config.data_plane() && config.window() == model::v1::WINDOW_IN_PLACE;
}

bool HasNvmeParameters(const model::v1::EngineConfig& config) {
  return config.data_plane() && config.parameter_tier() == model::v1::TIER_NVME;
}

bool UsesLocalAccumulators(const model::v1::EngineConfig& config) {
  return SumsMicroStepsFirst(config) && !config.data_plane();
}

uint64_t GradientWindowBytes(const Layout& layout, const model::v1::EngineConfig& config) {
  uint64_t all = 0;
  uint64_t largest = 0;
  for (const Unit& unit : layout.units()) {
    if ((!unit.trainable || config.forward_only()) && !config.data_plane()) continue;
    all += unit.bytes();
    largest = std::max(largest, unit.bytes());
  }
  if (config.data_plane()) {
    return RoundUpTo(std::clamp(2 * largest, kMinGradientWindow, kMaxPutWindow), kPage);
  }
  const uint64_t bucket = config.reduce_bucket_elements() > kMaxElements / 4
                              ? all
                              : config.reduce_bucket_elements() * sizeof(float);
  const uint64_t bounded = std::min(all, std::max(bucket, 2 * largest));
  return RoundUpTo(std::max(bounded, kMinGradientWindow), kPage);
}

uint64_t ParameterRingBytes(const Layout& layout, const model::v1::EngineConfig& config) {
  if (!HasNvmeParameters(config)) return 0;
  uint64_t all = 0;
  uint64_t largest = 0;
  uint64_t widest = 1;
  uint64_t elements = 0;
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const Unit& unit = layout.units()[u];
    if (layout.persistent(u, config.persistence_threshold())) continue;
    const uint64_t grains = (unit.grains + config.world_size() - 1) / config.world_size();
    const uint64_t shard =
        RoundUpTo(grains * kGrainElements * SizeOf(unit.dtype), kParameterRingAlignment);
    all += shard;
    largest = std::max(largest, shard);
    widest = std::max<uint64_t>(widest, SizeOf(unit.dtype));
    elements += unit.elements();
  }
  const uint64_t ahead =
      std::min(config.prefetch_elements(), elements) / config.world_size() * widest;
  return RoundUpTo(std::min(all, ahead + 2 * largest), kPage);
}

}  // namespace zeroshard
