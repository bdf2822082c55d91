// Capsules by which Python frameworks take tensors over memory that is not theirs: DLPack's
// structures (https://dmlc.github.io/dlpack, the unversioned form, which PyTorch 1.10 and later
// take), as far as they are needed here.
#ifndef ZEROSHARD_CLIENT_PYTHON_DLPACK_H_
#define ZEROSHARD_CLIENT_PYTHON_DLPACK_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/dtype.h"

namespace zeroshard::native {

enum class DlDeviceType : int32_t { kCpu = 1, kCuda = 2 };

// What a tensor is made over.
struct DlMemory {
  uint64_t address = 0;
  DlDeviceType device_type = DlDeviceType::kCuda;
  int32_t device = 0;  // as this process counts
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape{};
  // Kept until the last tensor over the memory is gone.
  std::shared_ptr<void> owner{};
};

// A capsule "dltensor" of dense memory; whoever takes it renames it and calls its deleter at the
// end. One that nobody takes cleans up after itself. Needs the GIL; the deleter does not.
pybind11::capsule MakeDlCapsule(DlMemory memory);

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_DLPACK_H_
