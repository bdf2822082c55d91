// RegisteredParts: parts of a mapping that are known to CUDA, where the mapping as a whole is too
// large for it or other processes use the rest.
//
// Moved only; not thread-safe while it is made, any thread may read it afterwards.
#ifndef ZEROSHARD_DEVICE_CUDA_REGISTERED_PARTS_H_
#define ZEROSHARD_DEVICE_CUDA_REGISTERED_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "device/cuda/address.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"

namespace zeroshard {

// [begin, end) of a mapping, in bytes.
struct HostPart {
  uint64_t begin = 0;
  uint64_t end = 0;
};

class RegisteredParts {
 public:
  // The parts, rounded out to pages; those that share or touch pages are registered together.
  // `memory` is page-aligned, and must stay mapped as long as the object lives. `progress` is
  // called between two of them, which take their time. Errors as RegisteredHost::Register.
  static absl::StatusOr<RegisteredParts> Register(
      const CudaDevice& device, std::span<std::byte> memory, std::vector<HostPart> parts,
      Access access, absl::FunctionRef<void()> progress = [] {});

  // Of a byte of one of the parts, on the device.
  DeviceAddress address(uint64_t offset) const;

  // Where the run from `offset` ends that is all of one registration, or of none; at most `end`.
  // CUDA refuses copies from or to more.
  uint64_t RunEnd(uint64_t offset, uint64_t end) const;

 private:
  struct Piece {
    uint64_t begin = 0;
    RegisteredHost host;
  };
  std::vector<Piece> pieces_;  // by their places
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_REGISTERED_PARTS_H_
