// OwnMemory: the device memory of a trainer itself: the window of gathered parameters and the slots
// that gradients wait in. It outlives a generation, so that a unit keeps its address.
//
// One caller at a time. Only for client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_TRAINER_MEMORY_H_
#define ZEROSHARD_CLIENT_DATAPLANE_TRAINER_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dataplane/data_plane.h"
#include "client/slot_ring.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"

namespace zeroshard {

class OwnMemory final : public TrainerMemory {
 public:
  // Of one ring of slots; it is never given back.
  struct Ring {
    SlotRing slots;
    DeviceMemory memory;
  };

  // kWhole: the window is one allocation, which the first unit that is mapped puts there; it can
  // be registered with NCCL. kOnDemand: pieces come and go.
  enum class WindowKind : uint8_t { kWhole, kOnDemand };
  static absl::StatusOr<std::shared_ptr<OwnMemory>> Create(std::unique_ptr<CudaDevice> device,
                                                           const Layout& layout, WindowKind kind);

  const CudaDevice& device() const { return *device_; }
  uint64_t fingerprint() const { return fingerprint_; }
  WindowKind kind() const { return kind_; }

  DeviceAddress address(uint32_t unit) const { return window_.address() + offsets_[unit]; }
  DeviceAddress window_address() const { return window_.address(); }
  bool mapped(uint32_t unit) const { return mapped_[unit] != 0; }
  uint64_t mapped_bytes() const { return window_.mapped_bytes(); }
  // Both do nothing where it is so already.
  absl::Status Map(uint32_t unit);
  absl::Status Unmap(uint32_t unit);

  std::vector<Ring>& rings() { return rings_; }
  absl::Status AddRing(uint64_t bytes);
  // Forgets which slots are taken: after a generation whose work has ended.
  void ClearSlots();

 private:
  OwnMemory(std::unique_ptr<CudaDevice> device, const Layout& layout, WindowKind kind);

  const std::unique_ptr<CudaDevice> device_;  // first: outlives all memory
  const uint64_t fingerprint_;
  const WindowKind kind_;
  std::vector<uint64_t> offsets_;  // by unit
  std::vector<uint64_t> bytes_;
  std::vector<char> mapped_;
  DeviceRange window_;
  std::vector<Ring> rings_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_TRAINER_MEMORY_H_
