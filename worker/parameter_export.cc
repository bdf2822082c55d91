#include "worker/parameter_export.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "storage/safetensors.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kUnitTimeout = absl::Seconds(30);

}  // namespace

absl::StatusOr<uint64_t> ExportParameters(Engine& engine, int fd) {
  const EngineContext& context = engine.context();
  const Layout& layout = context.layout();
  std::vector<TensorSpec> tensors;
  for (const ParameterSpec& parameter : layout.parameters()) {
    tensors.push_back({parameter.name, parameter.aliases, parameter.shape, parameter.dtype});
  }
  const std::string step = std::to_string(context.board().numbers().step);
  ZS_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                      SafetensorsWriter::Create(
                          fd, tensors, {{"job", context.memory().start().job()}, {"step", step}}));
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    ZS_RETURN_IF_ERROR(engine.MakeReadable(unit, kUnitTimeout));
    const uint64_t element_bytes = SizeOf(layout.units()[unit].dtype);
    for (uint32_t parameter : layout.units()[unit].parameters) {
      const ParameterPlace& place = layout.place(parameter);
      const std::byte* data = context.memory().unit_window(unit) + place.offset * element_bytes;
      ZS_RETURN_IF_ERROR(writer.Append(parameter, {data, place.elements * element_bytes}));
    }
    engine.DoneReading(unit);
  }
  return std::move(writer).Finish();
}

}  // namespace zeroshard
