#include "client/python/native_device.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/dtype.h"
#include "client/python/dlpack.h"
#include "client/python/native_errors.h"

namespace zeroshard::native {
namespace {

namespace py = pybind11;
using py::operator""_a;
using NoGil = py::call_guard<py::gil_scoped_release>;

// Streams are numbers in Python, as torch.cuda.Stream.cuda_stream.
StreamHandle ToStream(uint64_t stream) { return reinterpret_cast<StreamHandle>(stream); }

void CheckOnDevice(const SharedSession& self) {
  if (self->session->on_device()) return;
  throw StatusException{absl::FailedPreconditionError("this job trains on the host")};
}

py::dict Device(const SharedSession& self) {
  CheckOnDevice(self);
  const DeviceFacts& facts = self->session->device();
  return py::dict(
      "ordinal"_a = facts.ordinal, "name"_a = facts.name,
      "uuid"_a = py::bytes(reinterpret_cast<const char*>(facts.uuid.data()), facts.uuid.size()));
}

// A whole unit in the window, or any part of it.
py::capsule ParameterTensor(const SharedSession& self, uint32_t unit, uint64_t offset,
                            std::vector<int64_t> shape) {
  CheckOnDevice(self);
  const Session& session = *self->session;
  if (unit >= session.layout().units().size()) {
    throw StatusException{absl::InvalidArgumentError(absl::StrCat("there is no unit ", unit))};
  }
  const Unit& plan = session.layout().units()[unit];
  uint64_t elements = 1;
  for (const int64_t dimension : shape) elements *= static_cast<uint64_t>(dimension);
  if (offset + elements > plan.elements()) {
    throw StatusException{absl::InvalidArgumentError(
        absl::StrCat("elements [", offset, ", ", offset + elements, ") of unit ", unit,
                     ", which has ", plan.elements()))};
  }
  return MakeDlCapsule({.address = session.parameter_address(unit) + offset * SizeOf(plan.dtype),
                        .device = session.device().ordinal,
                        .dtype = plan.dtype,
                        .shape = std::move(shape),
                        // The window must outlive the tensor, the session need not.
                        .owner = session.device_memory()});
}

// (offset, capsule) of a new slot for a gradient of this unit.
py::tuple AcquireDevice(SharedSession& self, uint32_t unit) {
  CheckOnDevice(self);
  Session& session = *self->session;
  if (unit >= session.layout().units().size()) {
    throw StatusException{absl::InvalidArgumentError(absl::StrCat("there is no unit ", unit))};
  }
  const Unit& plan = session.layout().units()[unit];
  DeviceSlot slot;
  {
    py::gil_scoped_release release;
    slot = Value(session.AcquireDeviceSlot(plan.bytes()));
  }
  return py::make_tuple(slot.offset,
                        MakeDlCapsule({.address = slot.address,
                                       .device = session.device().ordinal,
                                       .dtype = plan.dtype,
                                       .shape = {static_cast<int64_t>(plan.elements())},
                                       .owner = session.device_memory()}));
}

py::dict Stats(const SharedSession& self) {
  const DataPlaneStats stats = self->session->device_stats();
  return py::dict(
      "gathered_bytes"_a = stats.gathered_bytes, "scattered_bytes"_a = stats.scattered_bytes,
      "scattered_between_nodes"_a = stats.scattered_between_nodes,
      "window_bytes"_a = stats.window_bytes, "peak_window_bytes"_a = stats.peak_window_bytes,
      "slot_bytes"_a = stats.slot_bytes, "overflows"_a = stats.overflows,
      "evictions"_a = stats.evictions, "host_waits"_a = stats.host_waits);
}

DType ParsedDType(const std::string& name) { return Value(ParseDType(name)); }

}  // namespace

void DefineDevice(py::module_& module, py::class_<NativeSession, SharedSession>& session) {
  py::class_<TrainerMemory, std::shared_ptr<TrainerMemory>>(module, "DeviceMemory");
  session
      .def_property_readonly("on_device",
                             [](const SharedSession& self) { return self->session->on_device(); })
      .def_property_readonly("device", &Device)
      .def_property_readonly(
          "device_memory", [](const SharedSession& self) { return self->session->device_memory(); })
      .def_property_readonly("device_stats", &Stats)
      .def("parameter_tensor", &ParameterTensor, "unit"_a, "offset"_a, "shape"_a)
      .def("acquire_device", &AcquireDevice, "unit"_a)
      .def(
          "abandon_device",
          [](SharedSession& self, uint64_t offset) {
            Check(self->session->AbandonDeviceSlot(offset));
          },
          "offset"_a)
      .def(
          "wait_on",
          [](SharedSession& self, const std::vector<uint32_t>& units, uint64_t stream) {
            Check(self->session->WaitOn(units, ToStream(stream)));
          },
          "units"_a, "stream"_a, NoGil())
      .def(
          "barrier", [](SharedSession& self) { Check(self->session->Barrier()); }, NoGil())
      .def(
          "refresh", [](SharedSession& self) { Check(self->session->Refresh()); }, NoGil());
  // For tests of what a framework is given.
  module.def(
      "dlpack",
      [](uint64_t address, std::vector<int64_t> shape, const std::string& dtype, int device,
         bool cuda) {
        return MakeDlCapsule({.address = address,
                              .device_type = cuda ? DlDeviceType::kCuda : DlDeviceType::kCpu,
                              .device = device,
                              .dtype = ParsedDType(dtype),
                              .shape = std::move(shape)});
      },
      "address"_a, "shape"_a, "dtype"_a, "device"_a = 0, "cuda"_a = true);
}

}  // namespace zeroshard::native
