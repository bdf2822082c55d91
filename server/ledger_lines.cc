#include "server/ledger_lines.h"

#include <algorithm>
#include <array>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/gpu_plan.h"
#include "storage/chunk_arrays.h"
#include "storage/layout_proto.h"
#include "storage/partition.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;
using model::v1::LedgerLine;

// The elements of `unit`'s parameters that lie in `range`, without padding.
uint64_t DataElements(const Layout& layout, const Unit& unit, GrainRange range) {
  const uint64_t begin = range.first_element();
  const uint64_t end = begin + range.elements();
  uint64_t elements = 0;
  for (const uint32_t parameter : unit.parameters) {
    const ParameterPlace& place = layout.place(parameter);
    const uint64_t from = std::max(begin, place.offset);
    const uint64_t to = std::min(end, place.offset + place.elements);
    if (from < to) elements += to - from;
  }
  return elements;
}

// The part of `total` that is share `index` of `shares`; all shares add up to it.
uint64_t Share(uint64_t total, uint64_t index, uint64_t shares) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(total) * (index + 1)) / shares -
                               (static_cast<unsigned __int128>(total) * index) / shares);
}

using Runs = std::vector<std::vector<GrainRange>>;  // of grains in order, by unit

// What of a worker's states rests on the NVMe tier at first; and the bytes of scales that go with
// it.
struct Homes {
  Runs states, parameters;
  uint64_t scales = 0;
};

// The tiers beside the host.
enum Elsewhere : uint8_t { kNvme, kGpu };
constexpr const char* kElsewhere[] = {"nvme", "gpu"};
// What is on them, by tier; null for nothing.
using RunsElsewhere = std::array<const Runs*, 2>;

Homes HomesOf(const Layout& layout, const NvmePlan& nvme) {
  Homes homes;
  homes.states.resize(layout.units().size());
  homes.parameters.resize(layout.units().size());
  for (const NvmeImage& image : nvme.images()) {
    if (!image.home) continue;
    const uint64_t begin = image.begin / kGrainElements;
    const GrainRange run = {begin, begin + image.elements / kGrainElements};
    std::vector<GrainRange>& runs =
        (image.parameters ? homes.parameters : homes.states)[image.unit];
    if (!runs.empty() && runs.back().end == run.begin) {
      runs.back().end = run.end;
    } else {
      runs.push_back(run);
    }
    for (const PartitionArray& array : image.arrays) {
      const ChunkArrayKind kind = array.array.kind;
      const bool scale = kind == ChunkArrayKind::kScales0 || kind == ChunkArrayKind::kScales1;
      if (scale) homes.scales += array.array.bytes;
    }
  }
  return homes;
}

class Ledger {
 public:
  explicit Ledger(const JobPlan& plan)
      : plan_(plan), layout_(plan.layout.front()), config_(plan.config) {}

  absl::StatusOr<std::vector<LedgerLine>> Lines() && {
    for (uint32_t w = 0; w < plan_.workers.size(); ++w) {
      if (plan_.placement.has_worker(w)) ZS_RETURN_IF_ERROR(AddWorker(w));
    }
    for (uint32_t island = 0; island < plan_.islands; ++island) {
      if (plan_.has_island(island)) AddIsland(island);
    }
    for (uint32_t r = 0; r < plan_.ranks.size(); ++r) {
      if (plan_.placement.has_rank(r)) AddRank(r);
    }
    return std::move(lines_);
  }

 private:
  void Add(const std::string& state, const std::string& holder, uint64_t bytes,
           uint64_t formula_bytes, const std::string& formula, const char* tier = "host") {
    if (bytes == 0 && formula_bytes == 0) return;
    LedgerLine line;
    line.set_state(state);
    line.set_tier(tier);
    line.set_holder(holder);
    line.set_bytes(bytes);
    line.set_formula_bytes(formula_bytes);
    line.set_formula(formula);
    lines_.push_back(line);
  }

  uint64_t RegionMemory(WorkerRegion::Kind kind, uint32_t index) const {
    for (const RegionPlan& region : plan_.regions) {
      if (region.kind == kind && region.index == index) return region.memory;
    }
    return 0;
  }

  // Bytes of the data of one worker's slices: `element_bytes` of a unit for every data element of
  // it.
  struct Amount {
    uint64_t data = 0;   // bytes of data elements
    uint64_t held = 0;   // the same with padding
    uint64_t total = 0;  // of the whole job, for the formula
    // The parts of `data` and `held` that rest elsewhere than on the host.
    uint64_t data_at[2] = {0, 0};
    uint64_t held_at[2] = {0, 0};
  };
  template <typename ElementBytes, typename Range>
  Amount Measure(ElementBytes element_bytes, Range range,
                 const RunsElsewhere& elsewhere = {}) const {
    Amount amount;
    for (uint32_t u = 0; u < layout_.units().size(); ++u) {
      const Unit& unit = layout_.units()[u];
      const uint64_t bytes = element_bytes(u);
      if (bytes == 0) continue;
      const GrainRange slice = range(u);
      amount.data += bytes * DataElements(layout_, unit, slice);
      amount.held += bytes * slice.elements();
      amount.total += bytes * unit.data_elements;
      for (const Elsewhere tier : {kNvme, kGpu}) {
        if (elsewhere[tier] == nullptr || elsewhere[tier]->empty()) continue;
        for (const GrainRange& run : (*elsewhere[tier])[u]) {
          amount.data_at[tier] += bytes * DataElements(layout_, unit, run);
          amount.held_at[tier] += bytes * run.elements();
        }
      }
    }
    return amount;
  }

  // What the lines of one worker's states come to.
  struct WorkerSums {
    uint64_t host = 0;             // listed there; with a data plane of what the partition has
    uint64_t padding = 0;          // on the host
    uint64_t data_at[2] = {0, 0};  // listed on the other tiers
    uint64_t held_at[2] = {0, 0};  // the same with padding
  };
  absl::Status AddWorker(uint32_t w);
  void AddState(const std::string& state, const std::string& holder, const Amount& amount,
                uint64_t share, const std::string& formula, WorkerSums& sums);
  void AddScales(const PartitionPlan& partition, const std::string& holder,
                 const uint64_t (&elsewhere)[2], WorkerSums& sums);
  void AddTier(const NvmePlan& nvme, const std::string& holder, uint32_t w, WorkerSums& sums);
  void AddGpu(const PartitionPlan& partition, uint32_t w, const WorkerSums& sums);
  void AddIsland(uint32_t island);
  void AddRank(uint32_t r);

  const JobPlan& plan_;
  const Layout& layout_;
  const model::v1::EngineConfig& config_;
  std::vector<LedgerLine> lines_;
};

absl::Status Ledger::AddWorker(uint32_t w) {
  ZS_ASSIGN_OR_RETURN(const PartitionPlan partition,
                      PartitionPlan::Create(layout_, config_, w, plan_.lanes));
  const std::string holder = absl::StrCat("worker ", w);
  const uint64_t shares = config_.stage() == 0 ? 1 : plan_.workers.size();
  const std::string over = shares == 1 && config_.stage() == 0 ? "" : "/N";
  std::optional<NvmePlan> nvme;
  Homes homes;
  if (!plan_.nvme_paths.empty()) {
    ZS_ASSIGN_OR_RETURN(nvme, plan_.NvmePlanOf(partition));
    homes = HomesOf(layout_, *nvme);
  }
  const bool gpu = DevicePlan::Exists(config_);
  GpuHomes on_gpu;
  Runs shards, slices;  // all of both are on the device
  if (gpu) {
    ZS_ASSIGN_OR_RETURN(const DevicePlan device, plan_.DevicePlanOf(partition));
    on_gpu = GpuHomesOf(plan_, partition, device);
    for (uint32_t u = 0; u < layout_.units().size(); ++u) {
      shards.push_back({partition.unit(u).shard});
      slices.push_back({partition.unit(u).slice});
    }
  }
  WorkerSums sums;
  auto add = [&](const std::string& state, const Amount& amount, const std::string& formula) {
    AddState(state, holder, amount, Share(amount.total, shares == 1 ? 0 : w, shares),
             amount.total == 0 ? "" : formula, sums);
  };
  auto slice = [&](uint32_t u) { return partition.unit(u).slice; };

  if (config_.stage() == 3 || gpu) {
    // At rest in the window (in place) or in the partition; a copied window's residents are the
    // window's.
    const bool in_place = config_.window() == model::v1::WINDOW_IN_PLACE;
    const Amount parameters = Measure(
        [&](uint32_t u) -> uint64_t {
          const bool counted = in_place || !partition.unit(u).resident;
          return counted ? SizeOf(layout_.units()[u].dtype) : 0;
        },
        [&](uint32_t u) { return partition.unit(u).shard; },
        {&homes.parameters, HasDeviceParameters(config_) ? &shards : nullptr});
    add(config_.stage() == 3 ? "parameters" : "parameters, shard", parameters,
        absl::StrCat(SizeOf(*DTypeFromProto(config_.compute_dtype())), "P/N"));
    if (HasHostParameters(config_)) sums.host -= parameters.data;  // not in the partition
  }
  const uint64_t g = SizeOf(*DTypeFromProto(config_.accumulator_dtype()));
  add("gradients",
      Measure([&](uint32_t u) { return partition.unit(u).accumulator == kAbsent ? 0 : g; }, slice,
              {nullptr, &slices}),
      absl::StrCat(g, "P", over));
  const bool split = config_.master_form() == model::v1::MASTER_FORM_SPLIT && config_.stage() > 0 &&
                     !config_.tiered();
  const bool halves = split || config_.master_form() == model::v1::MASTER_FORM_NONE;
  auto master_bytes = [&](uint32_t u) -> uint64_t {
    const UnitPlan& unit = partition.unit(u);
    return unit.master == kAbsent ? 0 : MasterElementBytes(unit.master_form);
  };
  add(split ? "master, low halves" : "master",
      Measure(master_bytes, slice, {&homes.states, &on_gpu.states}),
      absl::StrCat(halves ? 2 : 4, "P", over));
  const uint64_t state_bytes = StateElementBytes(partition.state_format());
  for (uint32_t slot = 0; slot < partition.state_slots(); ++slot) {
    add(config_.state_slots(static_cast<int>(slot)),
        Measure(
            [&](uint32_t u) { return partition.unit(u).state[slot] == kAbsent ? 0 : state_bytes; },
            slice, {&homes.states, &on_gpu.states}),
        absl::StrCat(state_bytes, "P", over));
  }
  AddScales(partition, holder, {homes.scales, on_gpu.scales}, sums);
  if (nvme.has_value()) AddTier(*nvme, holder, w, sums);
  if (gpu) {
    AddGpu(partition, w, sums);
  } else {
    Add("padding", holder, sums.padding, 0, "");
  }
  Add("records", holder,
      partition.totals().records + RegionMemory(WorkerRegion::KIND_DEVICE_COUNTERS, w), 0, "");
  return absl::OkStatus();
}

// What of the devices' memory is not state are spare images and tables. On the host, gradients and
// parameters of what is offloaded go through a ring.
void Ledger::AddGpu(const PartitionPlan& partition, uint32_t w, const WorkerSums& sums) {
  const std::string holder = absl::StrCat("worker ", w);
  const GpuBytes& gpu = plan_.gpus[w - plan_.placement.first_worker()];
  const uint64_t room = gpu.shared + gpu.states;
  Add("slots", holder, room - std::min(room, sums.data_at[kGpu]), 0, "", "gpu");
  const uint64_t region = RegionMemory(WorkerRegion::KIND_PARTITION, w);
  const uint64_t listed = sums.host + partition.totals().records;
  Add("offload staging", holder, region - std::min(region, listed) + gpu.ring, 0, "");
  Add("device table", holder, RegionMemory(WorkerRegion::KIND_DEVICE_TABLE, w), 0, "");
  Add("mirror", holder, RegionMemory(WorkerRegion::KIND_DEVICE_MIRROR, w), 0, "");
}

void Ledger::AddState(const std::string& state, const std::string& holder, const Amount& amount,
                      uint64_t share, const std::string& formula, WorkerSums& sums) {
  // The formula's share is split as the bytes are.
  uint64_t of[2] = {0, 0};
  uint64_t on_host = amount.data;
  uint64_t held = amount.held;
  for (const Elsewhere tier : {kNvme, kGpu}) {
    if (amount.data_at[tier] == 0) continue;
    of[tier] = static_cast<uint64_t>(static_cast<unsigned __int128>(share) * amount.data_at[tier] /
                                     amount.data);
    on_host -= amount.data_at[tier];
    held -= amount.held_at[tier];
    sums.data_at[tier] += amount.data_at[tier];
    sums.held_at[tier] += amount.held_at[tier];
  }
  // A worker that has nothing of it lists its share where the others have theirs.
  const bool none_on_gpu =
      amount.data == 0 && config_.data_plane() && config_.optimizer_tier() == model::v1::TIER_GPU;
  Add(state, holder, on_host, share - of[kNvme] - of[kGpu], formula, none_on_gpu ? "gpu" : "host");
  for (const Elsewhere tier : {kNvme, kGpu}) {
    Add(state, holder, amount.data_at[tier], of[tier], formula, kElsewhere[tier]);
  }
  sums.host += on_host;
  sums.padding += held - on_host;
}

// Files have room for two images of each chunk, with headers, and for spares. Pages that states on
// the tier share with others stay.
void Ledger::AddTier(const NvmePlan& nvme, const std::string& holder, uint32_t w,
                     WorkerSums& sums) {
  Add("slots", holder, nvme.extents().total_bytes() - sums.data_at[kNvme], 0, "", "nvme");
  Add("staging", holder, StagingBytes(plan_, nvme), 0, "");
  Add("slot table", holder, RegionMemory(WorkerRegion::KIND_SLOT_TABLE, w), 0, "");
  sums.padding += sums.held_at[kNvme] - nvme.unbacked_bytes();
}

// One fp32 a block and 8-bit state: 4 / 256 of an element and less than one block a parameter more.
void Ledger::AddScales(const PartitionPlan& partition, const std::string& holder,
                       const uint64_t (&elsewhere)[2], WorkerSums& sums) {
  uint64_t blocks = 0;
  for (uint32_t u = 0; u < layout_.units().size(); ++u) blocks += partition.unit(u).blocks;
  const uint64_t bytes = blocks * partition.state_slots() * sizeof(float);
  const Amount amount = {bytes,
                         bytes,
                         bytes,
                         {elsewhere[kNvme], elsewhere[kGpu]},
                         {elsewhere[kNvme], elsewhere[kGpu]}};
  AddState("scales", holder, amount, bytes, "4 a block", sums);
}

void Ledger::AddIsland(uint32_t island) {
  const std::string holder =
      plan_.islands == 1 ? std::string("node") : absl::StrCat("island ", island);
  const uint64_t window = RegionMemory(WorkerRegion::KIND_PARAMETER_WINDOW, island);
  uint64_t data = 0;
  uint64_t resident_data = 0;
  uint64_t padded = 0;
  for (uint32_t u = 0; u < layout_.units().size(); ++u) {
    const Unit& unit = layout_.units()[u];
    data += unit.data_elements * SizeOf(unit.dtype);
    padded += unit.bytes();
    if (config_.stage() < 3 || layout_.persistent(u, config_.persistence_threshold())) {
      resident_data += unit.data_elements * SizeOf(unit.dtype);
    }
  }
  if (HasHostParameters(config_)) {
    Add("padding", holder, window - std::min(window, data), 0, "");  // the workers have the rest
  } else if (config_.data_plane() && !HasNvmeParameters(config_)) {
    Add("window", holder, window, 0, "");  // of exports; trainers have their own
  } else if (config_.stage() == 3 && config_.window() == model::v1::WINDOW_IN_PLACE) {
    Add("padding", holder, window - std::min(window, padded), 0, "");  // the workers have the rest
  } else if (config_.stage() == 3) {
    Add("parameters, resident", holder, resident_data, resident_data, "");
    Add("window", holder, window - std::min(window, resident_data), 0, "");
  } else {
    Add("parameters", holder, data, data,
        absl::StrCat(SizeOf(*DTypeFromProto(config_.compute_dtype())), "P"));
    Add("padding", holder, window - std::min(window, data), 0, "");
  }
  Add("records", holder,
      RegionMemory(WorkerRegion::KIND_BOARD, island) +
          RegionMemory(WorkerRegion::KIND_USER_STATE, island),
      0, "");
}

void Ledger::AddRank(uint32_t r) {
  const std::string holder = absl::StrCat("rank ", r);
  Add("window", holder, RegionMemory(WorkerRegion::KIND_GRADIENT_WINDOW, r), 0, "");
  Add("records", holder, RegionMemory(WorkerRegion::KIND_RANK_PAGE, r), 0, "");
  if (config_.data_plane()) {
    const TrainerGpuBytes own = TrainerGpuBytesOf(layout_, config_);
    Add("window", holder, own.parameters, 0, "", "gpu");
    Add("gradient slots", holder, own.gradients, 0, "", "gpu");
  }
  const uint64_t local = RegionMemory(WorkerRegion::KIND_LOCAL_ACCUMULATOR, r);
  if (local == 0) return;
  const uint64_t data = layout_.trainable_elements() * sizeof(float);
  uint64_t padded = 0;
  for (const Unit& unit : layout_.units()) {
    if (unit.trainable) padded += unit.elements() * sizeof(float);
  }
  Add("gradients", holder, data, data, "4P");
  Add("padding", holder, padded - data, 0, "");
  Add("records", holder, local - padded, 0, "");
}

}  // namespace

absl::StatusOr<std::vector<LedgerLine>> LedgerLines(const JobPlan& plan) {
  return Ledger(plan).Lines();
}

uint64_t StagingBytes(const JobPlan& plan, const NvmePlan& nvme) {
  return nvme.StagingBuffers(plan.config.nvme(), plan.lanes) * nvme.max_image_bytes();
}

uint64_t WindowMemory(const Layout& layout, const model::v1::EngineConfig& config) {
  const bool whole = config.window() == model::v1::WINDOW_IN_PLACE || config.stage() < 3;
  if (whole && (!config.data_plane() || HasHostParameters(config))) return layout.window_bytes();
  uint64_t resident = 0;
  uint64_t live_elements = config.max_live_elements();
  uint64_t widest = 1;
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const Unit& unit = layout.units()[u];
    widest = std::max<uint64_t>(widest, SizeOf(unit.dtype));
    const bool stays = !config.data_plane() || HasNvmeParameters(config);
    if (stays && layout.persistent(u, config.persistence_threshold())) {
      resident += (unit.bytes() + kWindowAlignment - 1) / kWindowAlignment * kWindowAlignment;
    } else {
      live_elements = std::max(live_elements, unit.elements());
    }
  }
  if (live_elements > layout.window_bytes()) return layout.window_bytes();
  return std::min(layout.window_bytes(), resident + live_elements * widest);
}

}  // namespace zeroshard
