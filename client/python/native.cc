// zeroshard._native: the Python face of the C++ SDK (client/session.h), used by the pure-Python
// package beside it and by nobody else. Calls that may block release the GIL; an interrupted wait
// (Ctrl-C) ends with Python's own exception.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/python/native_convert.h"
#include "client/python/native_device.h"
#include "client/python/native_errors.h"
#include "client/python/native_optim.h"
#include "client/python/native_session.h"
#include "client/session.h"
#include "proto/model.pb.h"

namespace zeroshard::native {
namespace {

namespace py = pybind11;
using py::operator""_a;
using NoGil = py::call_guard<py::gil_scoped_release>;

using Shared = SharedSession;

// A window as a buffer. Views of it keep the session's memory mapped.
struct Window {
  Shared owner;
  void* data;
  size_t bytes;
  bool readonly;
};

bool Interrupted() {
  if (_Py_IsFinalizing() != 0) return true;
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

Shared Attach(const std::string& socket, const std::string& job, uint32_t rank, uint32_t world_size,
              uint32_t local_ranks, const py::list& parameters, const py::list& groups,
              const std::string& ds_config, const std::map<std::string, std::string>& overrides,
              uint32_t timeout_ms, bool forward_only, std::optional<int> cuda_device,
              std::shared_ptr<TrainerMemory> device_memory, const std::string& gave_up) {
  AttachOptions options{.socket = socket,
                        .job = job,
                        .rank = rank,
                        .world_size = world_size,
                        .local_ranks = local_ranks,
                        .parameters = ToParameters(parameters),
                        .groups = ToGroups(groups),
                        .ds_config = ds_config,
                        .overrides = overrides,
                        .forward_only = forward_only,
                        .cuda_device = cuda_device,
                        .device_memory = std::move(device_memory),
                        .gave_up = gave_up,
                        .interrupted = &Interrupted};
  if (timeout_ms != 0) options.timeout = absl::Milliseconds(timeout_ms);
  py::gil_scoped_release release;
  return std::make_shared<NativeSession>(Value(Session::Attach(std::move(options))));
}

uint64_t Put(Shared& self, uint32_t unit, uint64_t element_offset, uint64_t elements,
             uint64_t window_offset, bool last) {
  return Value(self->session->Put({.unit = unit,
                                   .element_offset = element_offset,
                                   .elements = elements,
                                   .window_offset = window_offset,
                                   .last = last}));
}

uint64_t Scatter(Shared& self, uint32_t unit, uint32_t micro_step, uint64_t window_offset,
                 const py::bytes& present, float weight, uint64_t stream) {
  ScatterRequest request{.unit = unit,
                         .micro_step = micro_step,
                         .window_offset = window_offset,
                         .present = present,
                         .weight = weight,
                         .stream = reinterpret_cast<StreamHandle>(stream)};
  py::gil_scoped_release release;
  return Value(self->session->Scatter(request));
}

uint64_t Step(Shared& self, uint32_t micro_steps, double weight_total, const py::list& groups,
              const py::bytes& user_state, uint64_t prefetch_hits, uint64_t prefetch_misses,
              uint64_t wait_us) {
  StepRequest request{.micro_steps = micro_steps,
                      .weight_total = weight_total,
                      .groups = ToGroups(groups),
                      .user_state = user_state,
                      .prefetch_hits = prefetch_hits,
                      .prefetch_misses = prefetch_misses,
                      .wait_us = wait_us};
  py::gil_scoped_release release;
  return Value(self->session->Step(request));
}

void Wait(Shared& self, uint64_t id, uint64_t timeout_ms) {
  Check(timeout_ms == 0 ? self->session->Wait(id)
                        : self->session->Wait(id, absl::Milliseconds(timeout_ms)));
}

uint64_t Acquire(Shared& self, uint64_t bytes, uint64_t timeout_ms) {
  return Value(timeout_ms == 0 ? self->session->AcquireSlot(bytes)
                               : self->session->AcquireSlot(bytes, absl::Milliseconds(timeout_ms)));
}

py::dict StepResultDict(const Shared& self) {
  const StepResult result = self->session->step_result();
  return py::dict("step"_a = result.step, "attempt"_a = result.attempt,
                  "updates"_a = result.updates, "loss_scale"_a = result.loss_scale,
                  "grad_norm"_a = result.grad_norm, "norm_valid"_a = result.norm_valid != 0,
                  "skipped"_a = result.skipped != 0);
}

py::dict Save(Shared& self, const std::string& name, bool exclude_frozen) {
  SaveResult result;
  {
    py::gil_scoped_release release;
    result = Value(self->session->Save(name, exclude_frozen));
  }
  return py::dict("step"_a = result.step, "bytes"_a = result.bytes,
                  "directory"_a = result.directory);
}

py::dict Restore(Shared& self, const std::string& name, bool parameters_only) {
  RestoreResult result;
  {
    py::gil_scoped_release release;
    result = Value(self->session->Restore(name, parameters_only));
  }
  return py::dict("step"_a = result.step, "bytes"_a = result.bytes,
                  "user_state"_a = py::bytes(result.user_state));
}

py::dict Export(Shared& self, const std::string& name, bool overwrite) {
  ExportResult result;
  {
    py::gil_scoped_release release;
    result = Value(self->session->Export(name, overwrite));
  }
  return py::dict("step"_a = result.step, "bytes"_a = result.bytes, "path"_a = result.path);
}

py::list Ledger(const Shared& self) {
  py::list lines;
  for (const LedgerEntry& line : self->session->ledger()) {
    lines.append(py::dict("state"_a = line.state, "tier"_a = line.tier, "holder"_a = line.holder,
                          "bytes"_a = line.bytes, "formula_bytes"_a = line.formula_bytes,
                          "formula"_a = line.formula));
  }
  return lines;
}

py::list Places(const Shared& self) {
  py::list places;
  const Layout& layout = self->session->layout();
  for (uint32_t i = 0; i < layout.parameters().size(); ++i) {
    const ParameterPlace& place = layout.place(i);
    places.append(py::make_tuple(place.unit, place.offset, place.elements));
  }
  return places;
}

Window ParameterWindow(const Shared& self) {
  const auto bytes = self->session->parameter_window();
  return {self, const_cast<std::byte*>(bytes.data()), bytes.size(), true};
}

Window GradientWindow(const Shared& self) {
  const auto bytes = self->session->gradient_window();
  return {self, bytes.data(), bytes.size(), false};
}

template <auto kMember>
auto StateField(const Shared& self) {
  return self->session->state().*kMember;
}

void DefineAttributes(py::class_<NativeSession, Shared>& session) {
  session.def_property_readonly("steps", &StateField<&SessionState::step>)
      .def_property_readonly("attempt", &StateField<&SessionState::attempt>)
      .def_property_readonly("updates", &StateField<&SessionState::updates>)
      .def_property_readonly("loss_scale", &StateField<&SessionState::loss_scale>)
      .def_property_readonly("initialized", &StateField<&SessionState::initialized>)
      .def_property_readonly("resumed", &StateField<&SessionState::resumed>)
      .def_property_readonly(
          "user_state",
          [](const Shared& self) { return py::bytes(self->session->state().user_state); })
      .def_property_readonly("warnings",
                             [](const Shared& self) { return self->session->warnings(); })
      .def_property_readonly("config",
                             [](const Shared& self) { return ToDict(self->session->config()); })
      .def_property_readonly("scheduler",
                             [](const Shared& self) { return self->session->scheduler(); })
      .def_property_readonly("ledger", &Ledger)
      .def_property_readonly("generation",
                             [](const Shared& self) { return self->session->generation(); })
      .def_property_readonly("rank", [](const Shared& self) { return self->session->rank(); })
      .def_property_readonly("world_size",
                             [](const Shared& self) { return self->session->world_size(); })
      .def_property_readonly("parameter_window", &ParameterWindow)
      .def_property_readonly("gradient_window", &GradientWindow)
      .def_property_readonly("parameter_epoch",
                             [](const Shared& self) { return self->session->parameter_epoch(); })
      .def("units", [](const Shared& self) { return UnitsToList(*self->session); })
      .def("places", &Places)
      .def("step_result", &StepResultDict);
}

void DefineRequests(py::class_<NativeSession, Shared>& session) {
  session.def("acquire", &Acquire, "bytes"_a, "timeout_ms"_a = 0, NoGil())
      .def(
          "abandon",
          [](Shared& self, uint64_t offset) { Check(self->session->AbandonSlot(offset)); },
          "offset"_a)
      .def("put", &Put, "unit"_a, "element_offset"_a, "elements"_a, "window_offset"_a, "last"_a,
           NoGil())
      .def(
          "gather",
          [](Shared& self, const std::vector<uint32_t>& units, bool alone, bool prefetch) {
            return Value(self->session->Gather(units, {.alone = alone, .prefetch = prefetch}));
          },
          "units"_a, "alone"_a = false, "prefetch"_a = false, NoGil())
      .def(
          "release",
          [](Shared& self, const std::vector<uint32_t>& units, uint64_t stream) {
            return Value(self->session->Release(units, reinterpret_cast<StreamHandle>(stream)));
          },
          "units"_a, "stream"_a = 0, NoGil())
      .def("scatter", &Scatter, "unit"_a, "micro_step"_a, "window_offset"_a,
           "present"_a = py::bytes(), "weight"_a = 0.0F, "stream"_a = 0)
      .def(
          "micro_end",
          [](Shared& self, uint32_t micro_step) {
            return Value(self->session->MicroEnd(micro_step));
          },
          "micro_step"_a, NoGil())
      .def("step", &Step, "micro_steps"_a, "weight_total"_a = 0.0, "groups"_a = py::list(),
           "user_state"_a = py::bytes(), "prefetch_hits"_a = 0, "prefetch_misses"_a = 0,
           "wait_us"_a = 0)
      .def("wait", &Wait, "id"_a, "timeout_ms"_a = 0, NoGil())
      .def(
          "done", [](const Shared& self, uint64_t id) { return self->session->Done(id); }, "id"_a);
}

void DefineCalls(py::class_<NativeSession, Shared>& session) {
  session.def("save", &Save, "name"_a, "exclude_frozen"_a = false)
      .def("restore", &Restore, "name"_a, "parameters_only"_a = false)
      .def("export", &Export, "name"_a, "overwrite"_a = false)
      .def(
          "detach",
          [](Shared& self, bool keep) {
            Check(self->session->Detach(keep ? Session::JobState::kKeep : Session::JobState::kEnd));
          },
          "keep"_a = false, NoGil())
      .def(
          "close", [](Shared& self) { self->session->Close(); }, NoGil());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The C++ SDK of ZeroShard; use the package zeroshard instead.";
  RegisterErrors();

  py::class_<Window>(module, "Window", py::buffer_protocol()).def_buffer([](Window& window) {
    return py::buffer_info(static_cast<uint8_t*>(window.data),
                           static_cast<py::ssize_t>(window.bytes), window.readonly);
  });
  py::class_<NativeSession, Shared> session(module, "Session");
  DefineAttributes(session);
  DefineRequests(session);
  DefineCalls(session);
  DefineDevice(module, session);

  module.def("attach", &Attach, "socket"_a, "job"_a, "rank"_a, "world_size"_a, "local_ranks"_a,
             "parameters"_a, "groups"_a, "ds_config"_a, "overrides"_a, "timeout_ms"_a = 0,
             "forward_only"_a = false, "cuda_device"_a = py::none(), "device_memory"_a = py::none(),
             "gave_up"_a = "");
  module.def("default_socket", &DefaultSocketPath);
  DefineOptim(module);
  module.def("install_write_guard", [] { Check(InstallWriteGuard()); });
}

}  // namespace zeroshard::native
