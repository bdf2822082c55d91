// The elements of units that belong to no parameter: a parameter starts at a multiple of 16
// elements, a unit ends with a grain.
//
// Trainers leave in the padding of their windows what they will. Sums run over it, as a range that
// is cut at every parameter of ten elements takes longer than its sum, but they store zeros there.
// So the padding of accumulators always holds zeros, and squares and updates may run over it, too.
//
// Immutable after construction; any thread.
#ifndef ZEROSHARD_WORKER_PADDING_H_
#define ZEROSHARD_WORKER_PADDING_H_

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "storage/layout.h"

namespace zeroshard {

class Padding {
 public:
  explicit Padding(const Layout& layout);

  // Of a unit that has so much of it that the ranges between would be very short: how many elements
  // of each row of 16 are a parameter's. Null for others.
  const uint8_t* used(uint32_t unit) const {
    return units_[unit].used.empty() ? nullptr : units_[unit].used.data();
  }

  // Writes zeros into the padding of the elements [begin, end) of `unit`, multiples of 16. `data`
  // is the unit's element 0.
  void Clear(uint32_t unit, std::byte* data, DType dtype, uint64_t begin, uint64_t end) const;

 private:
  struct UnitRows {
    uint64_t first = 0;  // in starts_
    uint64_t end = 0;
    std::vector<uint8_t> used;
  };

  // For every row of 16 elements with padding the first element of it, increasing in each unit; the
  // padding ends with the row.
  std::vector<uint64_t> starts_;
  std::vector<UnitRows> units_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_PADDING_H_
