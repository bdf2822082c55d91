// What a job with a data plane takes of GPUs, and what its host memory need not hold therefore.
// Pure; any thread. Formats: docs/device.md.
#ifndef ZEROSHARD_SERVER_GPU_PLAN_H_
#define ZEROSHARD_SERVER_GPU_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "server/planner.h"
#include "storage/device_plan.h"
#include "storage/layout.h"
#include "storage/partition.h"

namespace zeroshard {

// A rank's own device memory (client/dataplane), at most: but for what gradients take that come out
// of order.
struct TrainerGpuBytes {
  uint64_t parameters = 0;  // gathered at one time: all at stages 1 and 2; in whole pages
  uint64_t gradients = 0;   // under way between ranks; and its sum over micro-steps (stage 1)
};
TrainerGpuBytes TrainerGpuBytesOf(const Layout& layout, const model::v1::EngineConfig& config);

// What of a worker's partition is on its device instead, by unit, as runs of grains in order.
struct GpuHomes {
  std::vector<std::vector<GrainRange>> states;
  uint64_t bytes = 0;           // of all of their arrays
  uint64_t scales = 0;          // bytes of scales among them
  uint64_t unbacked_bytes = 0;  // of partition memory that nothing takes: whole pages
  bool offloads = false;        // some rest elsewhere, or parameters on nvme
};
GpuHomes GpuHomesOf(const JobPlan& plan, const PartitionPlan& partition, const DevicePlan& device);

// Plans the device of one worker: adds to plan.gpus, and the regions of the host that go with it.
// `partition` is the worker's, region `own` of `plan`; what is on the device takes no memory there.
absl::Status AddGpu(const PartitionPlan& partition, size_t own, JobPlan& plan);

// What protects the states of such a job, as a sentence for whoever attaches; says what is not
// protected, too.
std::string GpuProtection(const JobPlan& plan);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_GPU_PLAN_H_
