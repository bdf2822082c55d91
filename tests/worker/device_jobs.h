// Jobs on fake GPUs, and the same jobs on the host, for tests of the engine.
#ifndef ZEROSHARD_TESTS_WORKER_DEVICE_JOBS_H_
#define ZEROSHARD_TESTS_WORKER_DEVICE_JOBS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/storage/nvme_fixture.h"
#include "tests/worker/kernel_data_plane.h"
#include "tests/worker/state_forms.h"
#include "worker/cuda/cuda_shard.h"

namespace zeroshard {

struct DeviceCase {
  const char* form = "adamw_split";
  uint32_t stage = 2;
  uint32_t ranks = 2;
  uint32_t micro_steps = 1;
  model::v1::Tier tier = model::v1::TIER_GPU;
  double ratio = 1;
  model::v1::DType dtype = model::v1::DTYPE_BFLOAT16;
  model::v1::DType accumulator = model::v1::DTYPE_FLOAT32;
  uint32_t lanes = 1;
  bool ranks_first = false;
  bool power = false;  // durability, of states on the NVMe tier
  uint32_t mirror_steps = 0;
  bool host_parameters = false;
  bool without_master = false;  // whatever the form
  bool islands = false;         // each worker one of its own
  bool nvme_parameters = false;
};
std::string Describe(const DeviceCase& c);
void PrintTo(const DeviceCase& c, std::ostream* out);

class DeviceJob {
 public:
  enum class Where {
    kHost,       // on CPUs, without a data plane: what the others are compared with
    kDevice,     // a worker and a rank on each fake GPU, in this process
    kProcesses,  // the same, by LocalJob::RunProcess
  };
  // Has its initial parameters, unless in kProcesses.
  DeviceJob(const DeviceCase& c, Where where, const CudaShardOptions& device = {});
  // Goes on, on devices, from the drives of a job with `power` that has ended.
  explicit DeviceJob(const DeviceJob& ended);
  void End() { job_.reset(); }

  LocalJob& job() { return *job_; }
  KernelDataPlane& plane() { return plane_; }
  CudaShard& device(uint32_t w) { return static_cast<CudaShard&>(job_->device(w)); }

  void Put(uint32_t seed = 1);
  void Scatter(uint32_t step);
  void Arrive();
  // Steps [from, to); the fourth has an infinite gradient and is skipped.
  void Train(uint32_t from, uint32_t to);
  // Where parameters rest on the NVMe tier: the rank gathers all units, and its worker copies its
  // shards to the ring; in between `meanwhile` is done.
  void ExpectGathers(
      uint32_t rank, const std::function<void()>& meanwhile = [] {});
  // Where states of these units (all: none named) shall rest; on CPUs nothing.
  void Move(model::v1::Tier to, const std::vector<uint32_t>& units = {});
  // The generation is over: the step in flight is dropped unless it is decided, and all ranks come
  // anew.
  void NextGeneration();
  // All that a step leaves.
  std::string State();
  // What the first rank was told last.
  std::string LastFailure();
  // Bytes of states that the devices hold, and the drives.
  uint64_t OnDevices();
  uint64_t OnDrives();

 private:
  LocalJobOptions Options(Where where);
  void UseDevices(LocalJobOptions& options, Where where);

  const DeviceCase case_;
  const Where where_;
  const CudaShardOptions device_;
  DiskDir directory_;
  KernelDataPlane plane_;
  std::unique_ptr<LocalJob> job_;
};

// The state after `steps` steps.
std::string TrainedOnHost(const DeviceCase& c, uint32_t steps);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_DEVICE_JOBS_H_
