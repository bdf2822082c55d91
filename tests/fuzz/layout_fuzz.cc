// sources: storage/layout.cc storage/layout_proto.cc storage/utf8.cc proto/model.pb.cc
// sources: base/checksum.cc base/check.cc base/status.cc
// libs: protobuf absl_status absl_statusor absl_strings absl_str_format -lxxhash
// seeds: tests/fuzz/seeds/layout
// generated: //proto:model_cc

// Any bytes as a manifest and a number of workers: refused, or a layout in which every parameter
// has its place, parameters do not overlap, every grain has one owner, and the number of workers
// changes nothing else.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "proto/model.pb.h"
#include "storage/layout.h"
#include "storage/layout_proto.h"

namespace zeroshard {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckPlaces(const Layout& layout) {
  size_t placed = 0;
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const Unit& unit = layout.units()[u];
    Require(unit.parameters.size() <= kMaxUnitParameters);
    uint64_t end = 0;
    for (uint32_t p : unit.parameters) {
      Require(layout.place(p).unit == u && layout.place(p).offset >= end);
      end = layout.place(p).offset + layout.place(p).elements;
    }
    Require(end <= unit.elements());
    Require(unit.window_offset + unit.bytes() <= layout.window_bytes());
    placed += unit.parameters.size();
  }
  Require(placed == layout.parameters().size());
}

void CheckSlices(const Layout& layout) {
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    uint64_t next = 0;
    for (uint32_t worker = 0; worker < layout.workers(); ++worker) {
      const GrainRange slice = layout.slice(u, worker);
      Require(slice.begin == next && slice.end >= slice.begin);
      if (slice.size() > 0) {
        Require(layout.owner(u, slice.begin) == worker);
        Require(layout.owner(u, slice.end - 1) == worker);
      }
      next = slice.end;
    }
    Require(next == layout.units()[u].grains);
  }
}

void Run(std::string_view input) {
  if (input.empty()) return;
  const uint32_t workers = static_cast<uint8_t>(input.front());
  model::v1::Manifest manifest;
  if (!manifest.ParseFromArray(input.data() + 1, static_cast<int>(input.size() - 1))) return;
  const auto layout = LayoutFromProto(manifest, workers);
  if (!layout.ok()) return;
  CheckPlaces(*layout);
  CheckSlices(*layout);
  const auto one = LayoutFromProto(manifest, 1);
  Require(one.ok() && one->fingerprint() == layout->fingerprint());
  model::v1::Manifest back = ParametersToProto(layout->parameters());
  *back.mutable_groups() = manifest.groups();
  const auto again = LayoutFromProto(back, workers);
  Require(again.ok() && again->fingerprint() == layout->fingerprint());
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  zeroshard::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
