#include "worker/cuda/parameter_table.h"

namespace zeroshard {

std::vector<DeviceParameter> ParameterTableOf(const Layout& layout, uint32_t unit) {
  std::vector<DeviceParameter> table;
  for (const uint32_t parameter : layout.units()[unit].parameters) {
    const ParameterPlace& place = layout.place(parameter);
    table.push_back({place.offset, place.offset + place.elements});
  }
  return table;
}

}  // namespace zeroshard
