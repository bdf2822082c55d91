// The GPU of a trainer for tests: its gradients are made by the host and copied in, so that a run
// has the bits of one on the host.
#ifndef ZEROSHARD_TESTS_E2E_TRAINER_DEVICE_H_
#define ZEROSHARD_TESTS_E2E_TRAINER_DEVICE_H_

#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dataplane/data_plane.h"

namespace zeroshard {

class TrainerDevice {
 public:
  // FailedPrecondition in a build without CUDA.
  static absl::StatusOr<std::unique_ptr<TrainerDevice>> Open(int ordinal);
  virtual ~TrainerDevice() = default;

  // All of this object's work is on it.
  virtual StreamHandle stream() const = 0;
  // Both return when the copy is done.
  virtual absl::Status Read(DeviceAddress from, std::span<std::byte> to) = 0;
  virtual absl::Status Write(DeviceAddress to, std::span<const std::byte> from) = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_E2E_TRAINER_DEVICE_H_
