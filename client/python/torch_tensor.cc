#include "client/python/torch_tensor.h"

#include <string>

namespace zeroshard::native {

namespace py = pybind11;

TensorReader::TensorReader() {
  const py::module_ torch = py::module_::import("torch");
  strided_ = torch.attr("strided");
  float64_ = torch.attr("float64");
  for (DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    dtypes_[static_cast<int>(dtype)] = torch.attr(std::string(DTypeName(dtype)).c_str());
  }
}

py::object TensorReader::Attribute(const py::handle& object, const py::str& name) const {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object TensorReader::Call(const py::handle& object, const py::str& method) const {
  PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

uint64_t TensorReader::Number(const py::handle& object, const py::str& method) const {
  const uint64_t value = PyLong_AsUnsignedLongLong(Call(object, method).ptr());
  if (value == ~uint64_t{0} && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

py::object TensorReader::Gradient(const py::handle& parameter) const {
  py::object gradient = Attribute(parameter, grad_);
  return gradient.is_none() ? py::object() : gradient;
}

std::optional<TensorFacts> TensorReader::Facts(const py::handle& tensor) const {
  if (!Attribute(tensor, layout_).is(strided_)) return std::nullopt;
  if (!Attribute(tensor, is_cpu_).is(py::handle(Py_True))) return std::nullopt;
  const py::object dtype = Attribute(tensor, dtype_);
  for (int i = 0; i < 3; ++i) {
    if (!dtype.is(dtypes_[i])) continue;
    return TensorFacts{
        .dtype = static_cast<DType>(i),
        .elements = Number(tensor, numel_),
        .address = Number(tensor, data_ptr_),
        .contiguous = Call(tensor, is_contiguous_).is(py::handle(Py_True)),
    };
  }
  return std::nullopt;
}

uint64_t TensorReader::Address(const py::handle& tensor) const { return Number(tensor, data_ptr_); }

bool TensorReader::IsDouble(const py::handle& tensor) const {
  return Attribute(tensor, dtype_).is(float64_);
}

}  // namespace zeroshard::native
