#include "worker/padding.h"

#include <algorithm>
#include <utility>

namespace zeroshard {
namespace {

constexpr uint64_t kRow = kParameterAlignment;
// A padded row in every so many makes ranges too short for loops over whole grains.
constexpr uint64_t kDenseRows = 64;

uint64_t RowEnd(uint64_t element) { return (element / kRow + 1) * kRow; }

template <typename Storage>
void ClearRows(const uint64_t* row, const uint64_t* end, Storage* values) {
  for (; row != end; ++row) {
    for (uint64_t i = *row; i < RowEnd(*row); ++i) values[i] = 0;
  }
}

}  // namespace

Padding::Padding(const Layout& layout) {
  for (const Unit& unit : layout.units()) {
    UnitRows rows;
    rows.first = starts_.size();
    uint64_t end = 0;  // of the parameter before
    auto pad_to = [&](uint64_t begin) {
      for (; end < begin; end = RowEnd(end)) starts_.push_back(end);
    };
    for (const uint32_t parameter : unit.parameters) {
      const ParameterPlace& place = layout.place(parameter);
      pad_to(place.offset);
      end = place.offset + place.elements;
    }
    pad_to(unit.elements());
    rows.end = starts_.size();
    if ((rows.end - rows.first) * kDenseRows * kRow > unit.elements()) {
      rows.used.assign(unit.elements() / kRow, kRow);
      for (uint64_t i = rows.first; i < rows.end; ++i) {
        rows.used[starts_[i] / kRow] = static_cast<uint8_t>(starts_[i] % kRow);
      }
    }
    units_.push_back(std::move(rows));
  }
}

void Padding::Clear(uint32_t unit, std::byte* data, DType dtype, uint64_t begin,
                    uint64_t end) const {
  const uint64_t* first = starts_.data() + units_[unit].first;
  const uint64_t* last = starts_.data() + units_[unit].end;
  first = std::lower_bound(first, last, begin);
  last = std::lower_bound(first, last, end);
  if (dtype == DType::kFloat32) {
    ClearRows(first, last, reinterpret_cast<float*>(data));
  } else {
    ClearRows(first, last, reinterpret_cast<uint16_t*>(data));
  }
}

}  // namespace zeroshard
