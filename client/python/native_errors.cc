#include "client/python/native_errors.h"

#include <string>

namespace zeroshard::native {
namespace {

namespace py = pybind11;

void Raise(const absl::Status& status) {
  if (PyErr_Occurred() != nullptr) return;  // KeyboardInterrupt, while a wait was interrupted
  try {
    const py::object type = py::module_::import("zeroshard.errors").attr("ZeroShardError");
    const py::object error = type(std::string(status.message()),
                                  py::arg("code") = absl::StatusCodeToString(status.code()));
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (py::error_already_set& failed) {
    failed.restore();
  }
}

}  // namespace

void RegisterErrors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const StatusException& error) {
      Raise(error.status);
    }
  });
}

}  // namespace zeroshard::native
