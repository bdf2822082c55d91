// All ranks of a job on fake GPUs in one process, each with the memory that its worker would share,
// and the host's own sums to compare with.
#ifndef ZEROSHARD_TESTS_CLIENT_DATAPLANE_PLANE_WORLD_H_
#define ZEROSHARD_TESTS_CLIENT_DATAPLANE_PLANE_WORLD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/shared_memory.h"
#include "client/dataplane/data_plane.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "storage/board.h"
#include "storage/device_counters.h"
#include "storage/layout.h"

namespace zeroshard {

struct WorldOptions {
  uint32_t ranks = 2;
  DataPlaneConfig config{};
  DType dtype = DType::kFloat32;
  std::vector<uint64_t> sizes = {5000, 513, 7, 0, 1, 20000};
  std::vector<uint32_t> frozen{};  // parameters
  absl::Duration timeout = absl::Seconds(30);
  std::vector<std::string> nodes{};  // by rank; empty: all in one
};

// What one rank's worker and process hold.
struct WorldRank {
  std::unique_ptr<CudaDevice> device;
  std::optional<DeviceMemory> shared;
  std::shared_ptr<const MappedRegion> counters;
  std::optional<CudaStream> stream;  // the trainer's own
  std::unique_ptr<DataPlane> plane;
};

// One gradient.
struct Gradient {
  std::vector<std::byte> bytes;  // of the whole unit
  std::string present;           // as DeviceScatter's; empty: all
  float weight = 1.0F;
};
// By rank, for one unit in one micro-step; no value: the rank has none.
using Gradients = std::vector<std::optional<Gradient>>;

class PlaneWorld {
 public:
  // Restarts the fakes with these settings. Fails the test when anything cannot be made.
  explicit PlaneWorld(const WorldOptions& options, const std::string& cuda_settings = "");
  ~PlaneWorld();

  const Layout& layout() const { return layout_; }
  const WorldOptions& options() const { return options_; }
  WorldRank& rank(uint32_t rank) { return ranks_[rank]; }
  DataPlane& plane(uint32_t rank) { return *ranks_[rank].plane; }
  DeviceCounters& counters(uint32_t rank) { return *ranks_[rank].counters->As<DeviceCounters>(); }
  std::vector<uint32_t> Trainable() const;  // units with elements, in order

  // The options for a data plane of one rank; a descriptor of its own.
  DataPlaneOptions PlaneOptions(uint32_t rank);
  // Makes all data planes; those of the generation before are gone.
  void Connect();

  // As at the start of a generation.
  void ForgetKeys();

  // `call(rank)` on a thread for each rank.
  std::vector<absl::Status> Run(const std::function<absl::Status(uint32_t)>& call) const;
  // The same; every rank must come through.
  void RunAll(const std::function<absl::Status(uint32_t)>& call) const;

  // Sets the parameters at rest of a unit: each rank's slice in the memory that its worker shares.
  void SetParameters(uint32_t unit, const std::vector<std::byte>& bytes);
  std::vector<std::byte> Window(uint32_t rank, uint32_t unit);
  // The accumulators of all ranks together, as fp32 or in the accumulators' type.
  std::vector<std::byte> Accumulators(uint32_t unit);
  Presence PresenceOf(uint32_t rank, uint32_t unit);

  // Writes a gradient to a slot and scatters it.
  absl::Status Send(uint32_t rank, uint32_t unit, uint32_t micro_step, const Gradient& gradient);
  // Waits until the rank's sums of the attempt are there.
  absl::Status AwaitSummed(uint32_t rank, uint64_t attempt);

  void Write(uint32_t rank, DeviceAddress to, const std::vector<std::byte>& bytes);
  std::vector<std::byte> Read(uint32_t rank, DeviceAddress from, uint64_t bytes);

 private:
  absl::StatusOr<std::string> Meet(const std::string& key, const std::optional<std::string>& value,
                                   absl::Duration timeout);
  void PlaceUnits();

  const WorldOptions options_;
  Layout layout_;
  std::vector<std::vector<DeviceUnitPlace>> places_;  // by rank and unit
  std::vector<uint64_t> shared_bytes_;
  std::vector<WorldRank> ranks_;
  uint64_t generation_ = 0;
  absl::Mutex mu_;
  std::map<std::string, std::string> keys_ ABSL_GUARDED_BY(mu_);
};

// What the accumulators of a unit hold after these micro-steps, computed by worker/reduce_kernel.h.
// Parameters without any gradient keep the bytes of `before`.
std::vector<std::byte> SumOnHost(const PlaneWorld& world, uint32_t unit,
                                 const std::vector<Gradients>& micro_steps,
                                 std::vector<std::byte> before);
// Of the parameters that any of them has.
Presence PresenceOnHost(const PlaneWorld& world, uint32_t unit,
                        const std::vector<Gradients>& micro_steps);

// A gradient as a function of its place; with `absent` parameters are missing now and then.
Gradient MakeGradient(const PlaneWorld& world, uint32_t unit, uint64_t seed, bool absent,
                      bool weighted);
// The bytes of the unit's parameters alone, padding left out.
std::vector<std::byte> WithoutPadding(const PlaneWorld& world, uint32_t unit,
                                      const std::vector<std::byte>& bytes, size_t element_bytes);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_CLIENT_DATAPLANE_PLANE_WORLD_H_
