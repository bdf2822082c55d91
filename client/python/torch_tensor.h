// Reads torch tensors through their Python attributes, for code that does not link PyTorch.
// All functions need the GIL; a failing attribute arrives as Python's own exception.
#ifndef ZEROSHARD_CLIENT_PYTHON_TORCH_TENSOR_H_
#define ZEROSHARD_CLIENT_PYTHON_TORCH_TENSOR_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "base/dtype.h"

namespace zeroshard::native {

struct TensorFacts {
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;
  uint64_t address = 0;
  bool contiguous = false;

  friend bool operator==(const TensorFacts&, const TensorFacts&) = default;
};

// A string that is quick to look up.
inline pybind11::str Interned(const char* text) {
  return pybind11::reinterpret_steal<pybind11::str>(PyUnicode_InternFromString(text));
}

class TensorReader {
 public:
  // Imports torch.
  TensorReader();

  // The parameter's gradient; a null object for None.
  pybind11::object Gradient(const pybind11::handle& parameter) const;

  // nullopt: not a dense tensor of fp32, bf16 or fp16 in the memory of this host.
  std::optional<TensorFacts> Facts(const pybind11::handle& tensor) const;

  uint64_t Address(const pybind11::handle& tensor) const;

  // Whether `tensor` has torch's float64 type.
  bool IsDouble(const pybind11::handle& tensor) const;

 private:
  pybind11::object Attribute(const pybind11::handle& object, const pybind11::str& name) const;
  pybind11::object Call(const pybind11::handle& object, const pybind11::str& method) const;
  uint64_t Number(const pybind11::handle& object, const pybind11::str& method) const;

  pybind11::str grad_ = Interned("grad");
  pybind11::str dtype_ = Interned("dtype");
  pybind11::str layout_ = Interned("layout");
  pybind11::str is_cpu_ = Interned("is_cpu");
  pybind11::str numel_ = Interned("numel");
  pybind11::str data_ptr_ = Interned("data_ptr");
  pybind11::str is_contiguous_ = Interned("is_contiguous");
  pybind11::object strided_;
  pybind11::object float64_;
  pybind11::object dtypes_[3];  // in the order of DType
};

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_TORCH_TENSOR_H_
