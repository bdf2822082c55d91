#include "worker/unit_state.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/shard_format.h"
#include "worker/optim/split_master.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {
namespace {

using Source = StateArray::Source;

bool HasFloatMaster(const UpdateArrays& arrays) {
  return arrays.master == MasterKind::kFloat32 || arrays.master == MasterKind::kFloat32Canonical;
}

void SetMaster(const JobMemory& memory, uint32_t unit, UpdateArrays& arrays) {
  const UnitPlan& plan = memory.plan().unit(unit);
  std::byte* const at_rest = memory.parameters_at_rest(unit);
  std::byte* const own = plan.master == kAbsent ? nullptr : memory.partition() + plan.master;
  const uint64_t first = plan.slice.first_element();
  switch (plan.master_form) {
    case MasterForm::kFloat32:
      arrays.master = plan.canonical ? MasterKind::kFloat32Canonical : MasterKind::kFloat32;
      arrays.param = own == nullptr ? reinterpret_cast<float*>(at_rest)
                                    : reinterpret_cast<float*>(own) - first;
      return;
    case MasterForm::kSplit:
      arrays.master = MasterKind::kSplit;
      arrays.high = reinterpret_cast<uint16_t*>(at_rest);
      arrays.low = reinterpret_cast<uint16_t*>(own) - first;
      return;
    case MasterForm::kNone:
      arrays.master = MasterKind::kStochastic;
      arrays.high = own == nullptr ? reinterpret_cast<uint16_t*>(at_rest)
                                   : reinterpret_cast<uint16_t*>(own) - first;
      return;
  }
}

// Where the scale of each block of the unit goes in a grain's kMaxGrainBlocks places.
template <typename Fn>
void ForEachBlock(const Layout& layout, uint32_t unit, const BlockTable& blocks, GrainRange grains,
                  const Fn& fn) {
  const Unit& layout_unit = layout.units()[unit];
  for (uint32_t position = 0; position < layout_unit.parameters.size(); ++position) {
    const ParameterPlace& place = layout.place(layout_unit.parameters[position]);
    const uint64_t begin = std::max(place.offset, grains.first_element());
    const uint64_t end = std::min(place.offset + place.elements, grains.end * kGrainElements);
    for (uint64_t e = begin; e < end; e = (e / kGrainElements + 1) * kGrainElements) {
      const uint64_t grain = e / kGrainElements;
      fn(grain + blocks.shift[position],
         (grain - grains.begin) * kMaxGrainBlocks + e % kGrainElements / kParameterAlignment);
    }
  }
}

void PutHalves(const UpdateArrays& arrays, uint64_t begin, uint64_t end, const std::byte* values) {
  for (uint64_t e = begin; e < end; ++e) {
    uint16_t given;
    std::memcpy(&given, values + (e - begin) * sizeof(given), sizeof(given));
    if (arrays.high[e] != given) arrays.low[e] = 0;
  }
}

void PutRoundedMaster(float* master, DType dtype, uint64_t begin, uint64_t end,
                      const std::byte* values) {
  for (uint64_t at = begin; at < end; at += kGrainElements) {
    const uint64_t count = std::min(kGrainElements, end - at);
    std::array<uint16_t, kGrainElements> rounded, wanted;
    std::array<float, kGrainElements> widened;
    std::memcpy(wanted.data(), values + (at - begin) * SizeOf(dtype), count * SizeOf(dtype));
    ConvertElements(master + at, DType::kFloat32, rounded.data(), dtype, count);
    ConvertElements(wanted.data(), dtype, widened.data(), DType::kFloat32, count);
    for (uint64_t i = 0; i < count; ++i) {
      if (rounded[i] != wanted[i]) master[at + i] = widened[i];
    }
  }
}

}  // namespace

UnitState MakeUnitState(const JobMemory& memory, uint32_t unit) {
  const UnitPlan& plan = memory.plan().unit(unit);
  UnitState state;
  state.slots = memory.plan().state_slots();
  state.arrays.state_format = memory.plan().state_format();
  state.arrays.out_dtype = memory.layout().units()[unit].dtype;
  SetMaster(memory, unit, state.arrays);
  const uint64_t skipped =
      plan.slice.first_element() * StateElementBytes(state.arrays.state_format);
  for (uint32_t slot = 0; slot < state.slots; ++slot) {
    state.arrays.state[slot] = memory.partition() + plan.state[slot] - skipped;
    if (plan.scales[slot] == kAbsent) continue;
    state.arrays.absmax[slot] =
        reinterpret_cast<float*>(memory.partition() + plan.scales[slot]) - plan.first_block;
  }
  if (state.arrays.state_format == StateFormat::kInt8) {
    state.blocks = std::make_shared<const BlockTable>(MakeBlockTable(memory.layout(), unit));
  }
  return state;
}

UnitState StateInImage(const UnitState& state, const ChunkPlan& chunk, const ChunkShape& shape,
                       std::byte* image) {
  UnitState in_image = state;
  UpdateArrays& arrays = in_image.arrays;
  const uint64_t state_skip = chunk.begin * StateElementBytes(arrays.state_format);
  for (size_t i = 0; i < shape.arrays().size(); ++i) {
    std::byte* const data = image + shape.offset(i);
    switch (shape.arrays()[i].kind) {
      case ChunkArrayKind::kMaster:
        if (HasFloatMaster(arrays)) {
          arrays.param = reinterpret_cast<float*>(data) - chunk.begin;
        } else {
          arrays.high = reinterpret_cast<uint16_t*>(data) - chunk.begin;
        }
        break;
      case ChunkArrayKind::kState0:
        arrays.state[0] = data - state_skip;
        break;
      case ChunkArrayKind::kState1:
        arrays.state[1] = data - state_skip;
        break;
      case ChunkArrayKind::kScales0:
      case ChunkArrayKind::kScales1: {
        const int slot = shape.arrays()[i].kind == ChunkArrayKind::kScales0 ? 0 : 1;
        arrays.absmax[slot] =
            reinterpret_cast<float*>(data) - state.blocks->first[chunk.begin / kGrainElements];
        break;
      }
      case ChunkArrayKind::kParameter:
        break;
    }
  }
  return in_image;
}

UndoChunk UndoOfUpdate(const UnitState& state, const ChunkPlan& chunk) {
  const UpdateArrays& arrays = state.arrays;
  UndoChunk undo;
  undo.elements = chunk.elements;
  auto add = [&](void* element0, uint32_t bytes) {
    undo.arrays[undo.array_count++] = {static_cast<std::byte*>(element0) + chunk.begin * bytes,
                                       bytes};
  };
  if (HasFloatMaster(arrays)) {
    add(arrays.param, sizeof(float));
  } else {
    add(arrays.high, sizeof(uint16_t));
    if (arrays.master == MasterKind::kSplit) add(arrays.low, sizeof(uint16_t));
  }
  for (uint32_t slot = 0; slot < state.slots; ++slot) {
    add(arrays.state[slot], static_cast<uint32_t>(StateElementBytes(arrays.state_format)));
  }
  if (arrays.state_format != StateFormat::kInt8) return undo;
  undo.group_elements = kGrainElements;
  undo.max_slots = kMaxGrainBlocks;
  for (uint32_t slot = 0; slot < state.slots; ++slot) {
    undo.arrays[undo.array_count++] = {reinterpret_cast<std::byte*>(arrays.absmax[slot]),
                                       sizeof(float),
                                       state.blocks->first.data() + chunk.begin / kGrainElements};
  }
  return undo;
}

void PutMaster(const UnitState& state, DType dtype, uint64_t begin, uint64_t end,
               const std::byte* values) {
  const UpdateArrays& arrays = state.arrays;
  if (arrays.master == MasterKind::kSplit) {
    PutHalves(arrays, begin, end, values);
  } else if (arrays.master == MasterKind::kStochastic) {
    std::memcpy(arrays.high + begin, values, (end - begin) * sizeof(uint16_t));
  } else if (HasFloatMaster(arrays) && dtype == DType::kFloat32) {
    ConvertElements(values, dtype, arrays.param + begin, DType::kFloat32, end - begin);
  } else if (HasFloatMaster(arrays)) {
    PutRoundedMaster(arrays.param, dtype, begin, end, values);
  }
}

void ParametersOfMaster(const UnitState& state, uint64_t begin, uint64_t elements,
                        std::byte* parameters) {
  const UpdateArrays& arrays = state.arrays;
  if (arrays.master == MasterKind::kStochastic) {
    std::memcpy(parameters, arrays.high + begin, elements * sizeof(uint16_t));
    return;
  }
  ConvertElements(arrays.param + begin, DType::kFloat32, parameters, arrays.out_dtype, elements);
}

void AppendStateArrays(const UnitState& state, std::span<const std::string> names, bool master,
                       GrainRange grains, std::vector<StateArray>& arrays) {
  if (grains.size() == 0) return;
  auto in_memory = [&](std::string kind, RecordType type, void* element0) {
    const uint64_t bytes = type.grain_bytes();
    std::byte* const data = static_cast<std::byte*>(element0) + grains.begin * bytes;
    arrays.push_back({std::move(kind), type, grains, {data, grains.size() * bytes}});
  };
  const std::string master_kind(kKindMaster);
  if (master && HasFloatMaster(state.arrays)) {
    in_memory(master_kind, DType::kFloat32, state.arrays.param);
  } else if (master && state.arrays.master == MasterKind::kSplit) {
    arrays.push_back({master_kind, DType::kFloat32, grains, {}, Source::kSplitMaster});
  }
  for (uint32_t slot = 0; slot < state.slots; ++slot) {
    void* const element0 = state.arrays.state[slot];
    switch (state.arrays.state_format) {
      case StateFormat::kFloat32:
        in_memory(names[slot], DType::kFloat32, element0);
        break;
      case StateFormat::kBfloat16:
        in_memory(names[slot], DType::kBfloat16, element0);
        break;
      case StateFormat::kInt8:
        in_memory(names[slot], RecordType::Codes(), element0);
        arrays.push_back({absl::StrCat(names[slot], "_scales"),
                          RecordType::Scales(),
                          grains,
                          {},
                          Source::kScales,
                          slot});
        break;
    }
  }
}

void ReadStateArray(const Layout& layout, uint32_t unit, const UnitState& state,
                    const StateArray& array, GrainRange grains, std::span<std::byte> out) {
  auto* const values = reinterpret_cast<float*>(out.data());
  const uint64_t first = grains.first_element();
  switch (array.source) {
    case Source::kMemory: {
      const uint64_t skipped = (grains.begin - array.grains.begin) * array.type.grain_bytes();
      std::memcpy(out.data(), array.bytes.data() + skipped, out.size());
      return;
    }
    case Source::kSplitMaster:
      JoinMaster(state.arrays.high + first, state.arrays.low + first, grains.elements(), values);
      return;
    case Source::kScales:
      std::fill_n(values, grains.size() * kMaxGrainBlocks, 0.0f);
      ForEachBlock(layout, unit, *state.blocks, grains, [&](uint64_t block, uint64_t place) {
        values[place] = state.arrays.absmax[array.slot][block];
      });
      return;
  }
}

void WriteStateArray(const Layout& layout, uint32_t unit, const UnitState& state,
                     const StateArray& array, GrainRange grains, std::span<const std::byte> in) {
  const auto* const values = reinterpret_cast<const float*>(in.data());
  const uint64_t first = grains.first_element();
  switch (array.source) {
    case Source::kMemory: {
      const uint64_t skipped = (grains.begin - array.grains.begin) * array.type.grain_bytes();
      std::memcpy(array.bytes.data() + skipped, in.data(), in.size());
      const bool canonical = state.arrays.master == MasterKind::kFloat32Canonical;
      if (canonical && array.kind == kKindMaster) {
        CanonicalMaster(state.arrays.param + first, grains.elements());
      }
      return;
    }
    case Source::kSplitMaster: {
      std::vector<uint16_t> high(grains.elements());
      SplitMaster(values, grains.elements(), high.data(), state.arrays.low + first);
      return;
    }
    case Source::kScales:
      ForEachBlock(layout, unit, *state.blocks, grains, [&](uint64_t block, uint64_t place) {
        state.arrays.absmax[array.slot][block] = values[place];
      });
      return;
  }
}

}  // namespace zeroshard
