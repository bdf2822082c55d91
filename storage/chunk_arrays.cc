#include "storage/chunk_arrays.h"

#include <iterator>

#include "base/status.h"
#include "storage/block_table.h"

namespace zeroshard {

std::vector<PartitionArray> ChunkArraysOf(const Layout& layout, const PartitionPlan& plan,
                                          uint32_t chunk) {
  const ChunkPlan& part = plan.chunks()[chunk];
  const UnitPlan& unit = plan.unit(part.unit);
  const uint64_t skip = part.begin - unit.slice.first_element();
  std::vector<PartitionArray> arrays;
  const auto add = [&](ChunkArrayKind kind, uint32_t element_bytes, uint64_t at, uint64_t first,
                       uint64_t elements) {
    if (at == kAbsent || elements == 0) return;
    arrays.push_back({{kind, element_bytes, elements * element_bytes}, at + first * element_bytes});
  };
  const auto master_bytes = static_cast<uint32_t>(MasterElementBytes(unit.master_form));
  add(ChunkArrayKind::kMaster, master_bytes, unit.master, skip, part.elements);
  const auto state_bytes = static_cast<uint32_t>(StateElementBytes(plan.state_format()));
  constexpr ChunkArrayKind kStates[] = {ChunkArrayKind::kState0, ChunkArrayKind::kState1};
  constexpr ChunkArrayKind kScales[] = {ChunkArrayKind::kScales0, ChunkArrayKind::kScales1};
  static_assert(std::size(kStates) == kMaxStates && std::size(kScales) == kMaxStates);
  for (uint32_t s = 0; s < plan.state_slots(); ++s) {
    add(kStates[s], state_bytes, unit.state[s], skip, part.elements);
  }
  if (plan.state_format() != StateFormat::kInt8) return arrays;
  const uint64_t grain = part.begin / kGrainElements;
  const uint64_t first = FirstBlock(layout, part.unit, grain);
  const uint64_t end = FirstBlock(layout, part.unit, grain + part.elements / kGrainElements);
  for (uint32_t s = 0; s < plan.state_slots(); ++s) {
    add(kScales[s], sizeof(float), unit.scales[s], first - unit.first_block, end - first);
  }
  return arrays;
}

absl::StatusOr<std::vector<uint64_t>> ImageBytesOf(const Layout& layout,
                                                   const PartitionPlan& plan) {
  std::vector<uint64_t> bytes;
  for (uint32_t chunk = 0; chunk < plan.chunks().size(); ++chunk) {
    std::vector<ChunkArray> arrays;
    for (const PartitionArray& array : ChunkArraysOf(layout, plan, chunk)) {
      arrays.push_back(array.array);
    }
    if (arrays.empty()) {
      bytes.push_back(0);
      continue;
    }
    ZS_ASSIGN_OR_RETURN(const ChunkShape shape, ChunkShape::Create(arrays));
    bytes.push_back(shape.image_bytes());
  }
  return bytes;
}

}  // namespace zeroshard
