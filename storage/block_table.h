// Blocks of 8-bit optimizer states: the elements that share one scale.
//
// A block is what a grain and a parameter have in common: at most 256 elements, never of two
// parameters, never of two slices. So the states of one parameter do not depend on its neighbours
// or on the number of workers. Blocks are numbered through a unit from 0. Pure.
#ifndef ZEROSHARD_STORAGE_BLOCK_TABLE_H_
#define ZEROSHARD_STORAGE_BLOCK_TABLE_H_

#include <cstdint>
#include <vector>

#include "storage/layout.h"

namespace zeroshard {

// Blocks of one grain at most: parameters start at multiples of kParameterAlignment.
inline constexpr uint32_t kMaxGrainBlocks = kGrainElements / kParameterAlignment;

struct BlockTable {
  // The block of element e of the parameter at position p of the unit: e / 256 + shift[p].
  std::vector<uint64_t> shift;
  // Grain g has the blocks [first[g], first[g + 1]); grains + 1 entries.
  std::vector<uint64_t> first;
};

BlockTable MakeBlockTable(const Layout& layout, uint32_t unit);

// first[grain] without the table.
uint64_t FirstBlock(const Layout& layout, uint32_t unit, uint64_t grain);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_BLOCK_TABLE_H_
