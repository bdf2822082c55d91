#include "storage/block_table.h"

namespace zeroshard {
namespace {

// Whether a block begins inside a grain.
bool StartsInside(const ParameterPlace& place) {
  return place.elements > 0 && place.offset % kGrainElements != 0;
}

}  // namespace

BlockTable MakeBlockTable(const Layout& layout, uint32_t unit) {
  BlockTable table;
  table.first.reserve(layout.units()[unit].grains + 1);
  uint64_t inside = 0;
  for (const uint32_t parameter : layout.units()[unit].parameters) {
    const ParameterPlace& place = layout.place(parameter);
    // Grains that begin before this parameter does.
    while (table.first.size() * kGrainElements <= place.offset) {
      table.first.push_back(table.first.size() + inside);
    }
    if (StartsInside(place)) ++inside;
    table.shift.push_back(inside);
  }
  while (table.first.size() <= layout.units()[unit].grains) {
    table.first.push_back(table.first.size() + inside);
  }
  return table;
}

uint64_t FirstBlock(const Layout& layout, uint32_t unit, uint64_t grain) {
  uint64_t blocks = grain;
  for (const uint32_t parameter : layout.units()[unit].parameters) {
    const ParameterPlace& place = layout.place(parameter);
    if (place.offset >= grain * kGrainElements) break;
    if (StartsInside(place)) ++blocks;
  }
  return blocks;
}

}  // namespace zeroshard
