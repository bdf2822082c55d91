#include "tests/worker/kernel_data_plane.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "storage/layout_proto.h"
#include "worker/cuda/parameter_table.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

void Must(const absl::Status& status) { ZS_CHECK(status.ok(), std::string(status.message())); }

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

}  // namespace

// The sum of one unit in one worker's slice.
class KernelDataPlane::SliceSum {
 public:
  SliceSum(KernelDataPlane& plane, uint32_t worker)
      : plane_(plane),
        memory_(plane.job_->memory(worker)),
        shard_(static_cast<CudaShard&>(plane.job_->device(worker))),
        kernels_(Must(CudaKernels::Load(shard_.cuda_device()))),
        stream_(Must(CudaStream::Create(shard_.cuda_device(), StreamPriority::kNormal))),
        ranks_(memory_.ranks()),
        tree_(Must(ReductionTree::Create(ranks_, memory_.config().reduction_group()))),
        single_(Must(ReductionTree::Create(1, 1))) {}

  void Sum(uint32_t unit) {
    slice_ = memory_.plan().unit(unit).slice;
    if (!memory_.plan().unit(unit).has_optimizer || slice_.size() == 0) return;
    unit_ = unit;
    dtype_ = memory_.layout().units()[unit].dtype;
    // For each rank a gradient and a sum of its own, then presence words, then the parameters.
    presence_ = 2 * ranks_ * slice_.elements() * sizeof(float);
    table_ = presence_ + (2 * ranks_ + 2) * sizeof(Presence);
    const std::vector<DeviceParameter> table = ParameterTableOf(memory_.layout(), unit);
    scratch_.emplace(Must(DeviceMemory::Create(
        shard_.cuda_device(), table_ + (table.size() + 1) * sizeof(DeviceParameter))));
    Must(stream_.CopyToDevice(scratch_->address() + table_, table.data(),
                              table.size() * sizeof(DeviceParameter)));
    parameters_ = static_cast<uint32_t>(table.size());
    const DeviceAddress accumulator =
        shard_.shared_address() + memory_.device_plan()->unit(unit).accumulator;
    const DType accumulator_dtype = Must(DTypeFromProto(memory_.config().accumulator_dtype()));
    if (SumsMicroStepsFirst(memory_.config())) {
      SumOfSums(accumulator, accumulator_dtype);
    } else {
      bool before = false;
      for (uint32_t micro = 0; micro < memory_.config().accumulation_steps(); ++micro) {
        std::vector<SumInput> inputs;
        for (uint32_t rank = 0; rank < ranks_; ++rank) inputs.push_back(Input(micro, rank));
        before = Add(inputs, tree_.RankPlan(), accumulator, accumulator_dtype, 0, before) || before;
      }
    }
    Must(stream_.Synchronize(kPatience));
  }

  void Tell(uint64_t attempt) {
    Must(stream_.WriteValue(shard_.counters_address(), attempt));
    Must(stream_.Synchronize(kPatience));
  }

 private:
  DeviceAddress Own(uint32_t rank) const {
    return scratch_->address() + (ranks_ + rank) * slice_.elements() * sizeof(float);
  }
  DeviceAddress PresenceAt(uint32_t index) const {
    return scratch_->address() + presence_ + index * sizeof(Presence);
  }

  SumInput Input(uint32_t micro, uint32_t rank) {
    const auto found = plane_.gradients_.find({unit_, micro, rank});
    if (found == plane_.gradients_.end()) return {};
    const DeviceAddress data = scratch_->address() + rank * slice_.elements() * sizeof(float);
    Must(stream_.CopyToDevice(data,
                              found->second.values.data() + slice_.first_element() * SizeOf(dtype_),
                              slice_.elements() * SizeOf(dtype_)));
    Must(stream_.CopyToDevice(PresenceAt(2 + rank), &found->second.present, sizeof(Presence)));
    return {.data = data,
            .presence = PresenceAt(2 + rank),
            .weight = found->second.weight,
            .dtype = dtype_};
  }

  // Adds the inputs' sum; `held` is where the presence of what the target holds is noted. Returns
  // whether there was anything.
  bool Add(const std::vector<SumInput>& inputs, const ReductionPlan& plan, DeviceAddress target,
           DType dtype, uint32_t held, bool before) {
    if (std::all_of(inputs.begin(), inputs.end(),
                    [](const SumInput& input) { return input.data == 0; })) {
      return false;
    }
    const ReductionProgram program = plan.Program();
    Must(kernels_->Sum(stream_, {.inputs = inputs,
                                 .program = &program,
                                 .parameters = scratch_->address() + table_,
                                 .parameter_count = parameters_,
                                 .first = slice_.first_element(),
                                 .elements = slice_.elements(),
                                 .accumulator = target,
                                 .accumulator_dtype = dtype,
                                 .before = before ? PresenceAt(held) : 0}));
    std::vector<DeviceAddress> presences;
    for (const SumInput& input : inputs) {
      if (input.data != 0) presences.push_back(input.presence);
    }
    Must(kernels_->MergePresence(
        stream_,
        {.inputs = presences, .before = before ? PresenceAt(held) : 0, .after = PresenceAt(held)}));
    return true;
  }

  // Each rank's micro-steps first.
  void SumOfSums(DeviceAddress accumulator, DType accumulator_dtype) {
    std::vector<SumInput> sums;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      const uint32_t held = 2 + ranks_ + rank;
      bool any = false;
      for (uint32_t micro = 0; micro < memory_.config().accumulation_steps(); ++micro) {
        const SumInput input = Input(micro, rank);
        any = Add({input}, single_.RankPlan(), Own(rank), DType::kFloat32, held, any) || any;
      }
      sums.push_back(any ? SumInput{.data = Own(rank), .presence = PresenceAt(held)} : SumInput{});
    }
    Add(sums, tree_.RankPlan(), accumulator, accumulator_dtype, 0, false);
  }

  KernelDataPlane& plane_;
  const JobMemory& memory_;
  CudaShard& shard_;
  std::unique_ptr<CudaKernels> kernels_;
  CudaStream stream_;
  const uint32_t ranks_;
  const ReductionTree tree_;
  const ReductionTree single_;
  uint32_t unit_ = 0;
  GrainRange slice_;
  DType dtype_ = DType::kFloat32;
  std::optional<DeviceMemory> scratch_;
  uint64_t presence_ = 0;
  uint64_t table_ = 0;
  uint32_t parameters_ = 0;
};

void KernelDataPlane::Scatter(const Gradient& gradient) {
  gradients_[{gradient.unit, gradient.micro_step, gradient.rank}] = {
      {gradient.values.begin(), gradient.values.end()}, gradient.present, gradient.weight};
}

void KernelDataPlane::Forget() {
  gradients_.clear();
  summed_.clear();
  told_.clear();
}

void KernelDataPlane::LetGo() {
  for (const auto& [rank, attempt] : *held_) SliceSum(*this, rank).Tell(attempt);
  held_.reset();
}

void KernelDataPlane::Boundary(uint32_t rank, uint64_t attempt) {
  if (std::exchange(told_[rank], attempt) == attempt) return;
  SliceSum sum(*this, rank);
  for (uint32_t unit = 0; unit < job_->layout().units().size(); ++unit) sum.Sum(unit);
  if (held_.has_value()) {
    held_->insert_or_assign(rank, attempt);
  } else {
    sum.Tell(attempt);
  }
  summed_.insert(rank);
  if (summed_.size() < job_->ranks()) return;
  summed_.clear();
  gradients_.clear();
}

}  // namespace zeroshard
