#include "client/python/dlpack.h"

#include <utility>

namespace zeroshard::native {
namespace {

namespace py = pybind11;

constexpr char kUntaken[] = "dltensor";

struct DlDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DlManagedTensor {
  DlTensor tensor;
  void* manager_ctx;
  void (*deleter)(DlManagedTensor*);
};
static_assert(sizeof(DlTensor) == 48 && sizeof(DlManagedTensor) == 64);

DlDataType ToDl(DType dtype) {
  constexpr uint8_t kFloat = 2;
  constexpr uint8_t kBfloat = 4;
  const auto bits = static_cast<uint8_t>(8 * SizeOf(dtype));
  return {dtype == DType::kBfloat16 ? kBfloat : kFloat, bits, 1};
}

// The structure with all that it points to.
struct Tensor {
  explicit Tensor(DlMemory from) : memory(std::move(from)), strides(memory.shape.size(), 1) {
    for (size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * memory.shape[i];
    managed.tensor = {reinterpret_cast<void*>(memory.address),
                      {static_cast<int32_t>(memory.device_type), memory.device},
                      static_cast<int32_t>(memory.shape.size()),
                      ToDl(memory.dtype),
                      memory.shape.data(),
                      strides.data(),
                      0};
    managed.manager_ctx = this;
    managed.deleter = [](DlManagedTensor* self) { delete static_cast<Tensor*>(self->manager_ctx); };
  }

  DlMemory memory;
  std::vector<int64_t> strides;
  DlManagedTensor managed = {};
};

void DropUntaken(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kUntaken) == 0) return;
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, kUntaken));
  managed->deleter(managed);
}

}  // namespace

py::capsule MakeDlCapsule(DlMemory memory) {
  auto tensor = std::make_unique<Tensor>(std::move(memory));
  PyObject* capsule = PyCapsule_New(&tensor->managed, kUntaken, &DropUntaken);
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(tensor.release());
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace zeroshard::native
