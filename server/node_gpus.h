// NodeGpus: the GPUs that this daemon's jobs work on, and how much of their memory is promised.
//
// The server learns of GPUs from a probe (server/gpu_probe.h) and from its workers; it opens none.
// Any thread.
#ifndef ZEROSHARD_SERVER_NODE_GPUS_H_
#define ZEROSHARD_SERVER_NODE_GPUS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/model.pb.h"
#include "server/gpu_probe.h"
#include "server/planner.h"

namespace zeroshard {

class NodeGpus {
 public:
  // Takes `devices` of what a probe found; kAllGpus are all that can be used, at least one.
  // `limit`: bytes of each for all jobs, 0 for none. NotFound for a device that there is not,
  // FailedPrecondition for one that cannot be used.
  static absl::StatusOr<std::unique_ptr<NodeGpus>> Create(const std::vector<std::string>& devices,
                                                          uint64_t limit, std::vector<Gpu> found);

  // Names in the order of the configuration, resolved.
  std::vector<std::string> devices() const;
  // Of a name that devices() has.
  const Gpu& at(const std::string& device) const;
  std::span<const Gpu> gpus() const { return gpus_; }
  uint64_t limit() const { return limit_; }
  // What jobs may be promised of a GPU.
  uint64_t Capacity(const Gpu& gpu) const;

  // What a worker there says is free, of all processes; nothing when its job has ended. For people:
  // it is old when it is heard.
  void SetFree(const std::string& device, std::optional<uint64_t> bytes);
  std::optional<uint64_t> Free(const std::string& device) const;

 private:
  NodeGpus(std::vector<Gpu> gpus, uint64_t limit) : gpus_(std::move(gpus)), limit_(limit) {}

  // Constant after construction.
  const std::vector<Gpu> gpus_;
  const uint64_t limit_;

  mutable absl::Mutex mu_;
  std::map<std::string, uint64_t> free_ ABSL_GUARDED_BY(mu_);
};

// "cuda:1, GPU-9d62dd2b-... (NVIDIA H100 80GB HBM3)".
std::string DescribeGpu(const Gpu& gpu);

// The devices of a job's workers, one a rank: the GPU that the rank names by its uuid, and for
// ranks that name none the first that are left. FailedPrecondition for a GPU that the daemon does
// not have, or that two ranks name, with both.
absl::StatusOr<std::vector<std::string>> PlaceOnGpus(std::span<const Gpu> gpus,
                                                     std::span<const model::v1::Device> ranks);

// OK when rank `rank` trains on its worker's GPU, or does not say on which. FailedPrecondition
// names both GPUs.
absl::Status CheckSameGpu(uint32_t rank, const model::v1::Device& of_rank, const Gpu& of_worker);

// OK when `plan` fits on its GPUs beside what other jobs are promised there, by device.
// ResourceExhausted with figures. What programs of others use the worker finds when it starts.
using GpuInUse = std::map<std::string, uint64_t>;
absl::Status CheckGpuMemory(const std::string& job, const JobPlan& plan, const NodeGpus& gpus,
                            const GpuInUse& in_use);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NODE_GPUS_H_
