#include "worker/cuda/launch_plan.h"

#include <algorithm>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "worker/cuda/squares_tile.h"

namespace zeroshard::gpu {
namespace {

// A parameter starts at a multiple of as many elements; so no vector holds parts of two.
constexpr uint64_t kRangeAlignment = 16;
constexpr uint64_t kAddressAlignment = 16;
constexpr uint64_t kMaxUpdateElements = uint64_t{1} << 31;
static_assert(static_cast<uint32_t>(DType::kFloat32) == kTypeFloat32 &&
              static_cast<uint32_t>(DType::kBfloat16) == kTypeBfloat16 &&
              static_cast<uint32_t>(DType::kFloat16) == kTypeFloat16);
static_assert(kMaxSumInputs == kMaxInputs && kDevicePresenceWords == kPresenceWords);
static_assert(sizeof(DeviceParameter) == sizeof(Place) && kStateGrain == kStateBlock);

constexpr const char* kNames[] = {
#define ZS_UPDATE_NAMES(kind, functor)                                                         \
  "zs_update_" #functor "_fp32", "zs_update_" #functor "_bf16", "zs_update_" #functor "_int8", \
      "zs_update_" #functor "_none_fp32", "zs_update_" #functor "_none_bf16",
    ZS_FOR_EACH_OPTIMIZER(ZS_UPDATE_NAMES)
#undef ZS_UPDATE_NAMES
        "zs_sum_any",
    "zs_sum_any_deep",
    "zs_sum_bf16",
    "zs_sum_fp16",
    "zs_merge_presence",
    "zs_squares",
    "zs_convert"};
static_assert(std::size(kNames) == kKernels);

// What of an optimizer decides about its kernels.
struct Optimizer {
  int states;
  bool eight_bit;
};

constexpr Optimizer kOptimizers[] = {
#define ZS_OPTIMIZER(kind, functor) \
  {functor::kStates, functor::kStates > 0 && functor::kStateMaps[0] != StateMap::kNone},
    ZS_FOR_EACH_OPTIMIZER(ZS_OPTIMIZER)
#undef ZS_OPTIMIZER
};

absl::Status CheckAddress(std::string_view what, DeviceAddress address,
                          uint64_t alignment = kAddressAlignment) {
  if (address == 0) return absl::InvalidArgumentError(absl::StrCat("a kernel without ", Abs(what)));
  if (address % alignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a kernel's ", Abs(what), " at address ",
                                                 absl::Hex(address), ", which is no multiple of ",
                                                 alignment));
}

absl::Status CheckPair(std::string_view what, const DeviceArrayPair& pair) {
  ZS_RETURN_IF_ERROR(CheckAddress(what, pair.before));
  return CheckAddress(what, pair.after);
}

absl::Status CheckRange(uint64_t first, uint64_t elements, uint64_t multiple) {
  if (elements > 0 && first % multiple == 0 && elements % multiple == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a kernel over ", elements, " elements from ",
                                                 first, "; both are multiples of ", multiple,
                                                 ", and the first of these is not 0"));
}

uint64_t BlocksFor(uint64_t threads) { return (threads + kBlockThreads - 1) / kBlockThreads; }

bool IsStochastic(const UpdateLaunch& launch) {
  return launch.master_kind == MasterKind::kStochastic;
}

// Whether the kernel is one of those for parameters without a master.
bool HandlesOctets(const UpdateLaunch& launch) {
  const bool states = kOptimizers[static_cast<size_t>(launch.kind)].states > 0;
  return IsStochastic(launch) && !(states && launch.state_format == StateFormat::kInt8);
}

absl::Status CheckUpdate(const UpdateLaunch& launch, const Optimizer& optimizer) {
  const bool int8 = launch.state_format == StateFormat::kInt8;
  ZS_RETURN_IF_ERROR(
      CheckRange(launch.first, launch.elements, int8 ? kStateGrain : kRangeAlignment));
  if (launch.elements >= kMaxUpdateElements) {
    return absl::InvalidArgumentError(
        absl::StrCat("an update of ", launch.elements, " elements at once"));
  }
  if (launch.master_kind == MasterKind::kSplit) {
    return absl::InvalidArgumentError("split masters have no kernel: canonical ones do");
  }
  ZS_RETURN_IF_ERROR(CheckAddress("gradient", launch.grad));
  ZS_RETURN_IF_ERROR(CheckPair("master", launch.master));
  if (launch.parameter != 0) ZS_RETURN_IF_ERROR(CheckAddress("parameter", launch.parameter));
  if (IsStochastic(launch) && launch.parameter != 0 && launch.parameter_dtype != DType::kBfloat16) {
    return absl::InvalidArgumentError("parameters without a master that are not bf16");
  }
  if (int8 && optimizer.states > 0 && !optimizer.eight_bit) {
    return absl::InvalidArgumentError("an optimizer without 8-bit states");
  }
  for (int slot = 0; slot < optimizer.states; ++slot) {
    ZS_RETURN_IF_ERROR(CheckPair("state", launch.state[slot]));
    if (!int8) continue;
    ZS_RETURN_IF_ERROR(CheckAddress("scales", launch.scales[slot].before, sizeof(float)));
    ZS_RETURN_IF_ERROR(CheckAddress("scales", launch.scales[slot].after, sizeof(float)));
  }
  return absl::OkStatus();
}

// The place in KernelNames().
uint32_t UpdateKernelOf(const UpdateLaunch& launch) {
  const bool stateless = kOptimizers[static_cast<size_t>(launch.kind)].states == 0;
  const auto format = stateless ? 0 : static_cast<uint32_t>(launch.state_format);
  const bool halves = HandlesOctets(launch);
  return static_cast<uint32_t>(launch.kind) * kUpdateKernels + format +
         (halves ? kWithoutMaster : 0);
}

uint32_t MasterOf(MasterKind kind) {
  if (kind == MasterKind::kStochastic) return kMasterStochastic;
  return kind == MasterKind::kFloat32Canonical ? kMasterCanonical : kMasterFloat32;
}

// Whether two updates can be rows of one call.
bool AreAlike(const UpdateLaunch& a, const UpdateLaunch& b) {
  return a.kind == b.kind && a.state_format == b.state_format && a.grad_dtype == b.grad_dtype &&
         a.master_kind == b.master_kind && a.parameter_dtype == b.parameter_dtype &&
         a.grad_scale == b.grad_scale && a.args.data() == b.args.data() &&
         a.args.size() == b.args.size();
}

// Puts updates into as few calls as runs, arguments and chunks allow. A chunk that does not fit is
// cut where a run begins.
class UpdatePlanner {
 public:
  absl::Status Add(const UpdateLaunch& launch) {
    const Optimizer& optimizer = kOptimizers[static_cast<size_t>(launch.kind)];
    ZS_RETURN_IF_ERROR(CheckUpdate(launch, optimizer));
    if (calls_.empty() || !AreAlike(*launch_, launch) || params().chunks == kMaxChunks) {
      OpenCall(launch);
    }
    launch_ = &launch;
    states_ = optimizer.states;
    OpenChunk(launch.first);
    const uint64_t end = launch.first + launch.elements;
    uint64_t last_end = launch.first;
    for (const UpdateSegment& segment : launch.segments) {
      const uint64_t from = std::max(segment.begin, launch.first);
      const uint64_t to = std::min(segment.end, end);
      if (from >= to) continue;
      if (from % kRangeAlignment != 0 || from < last_end || segment.args >= launch.args.size()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "an update of elements [", segment.begin, ", ", segment.end, ") with arguments ",
            segment.args, " of ", launch.args.size(), ", behind one that ends at ", last_end));
      }
      AddSegment(from, to, segment);
      last_end = to;
    }
    CloseChunk(end);
    return absl::OkStatus();
  }

  std::vector<KernelCall<UpdateParams>> Take() { return std::move(calls_); }

 private:
  UpdateParams& params() { return calls_.back().params; }
  UpdateChunk& chunk() { return params().chunk[params().chunks - 1]; }

  void OpenCall(const UpdateLaunch& launch) {
    calls_.push_back({.kernel = UpdateKernelOf(launch)});
    params().grad_scale = launch.grad_scale;
    params().grad_type = static_cast<uint32_t>(launch.grad_dtype);
    params().parameter_type = static_cast<uint32_t>(launch.parameter_dtype);
    params().master = MasterOf(launch.master_kind);
    args_.clear();
    runs_ = 0;
  }

  void OpenChunk(uint64_t begin) {
    ++params().chunks;
    chunk().first = begin;
    chunk().first_run = runs_;
    calls_.back().rows = params().chunks;
  }

  // The last one, of which nothing is in this call.
  void DropChunk() {
    chunk() = {};
    calls_.back().rows = --params().chunks;
  }

  void CloseChunk(uint64_t end) {
    UpdateChunk& c = chunk();
    const uint64_t skipped = c.first - launch_->first;
    c.elements = static_cast<uint32_t>(end - c.first);
    c.grad = launch_->grad + skipped * SizeOf(launch_->grad_dtype);
    const uint64_t master_bytes = IsStochastic(*launch_) ? sizeof(uint16_t) : sizeof(float);
    c.master_before = launch_->master.before + skipped * master_bytes;
    c.master_after = launch_->master.after + skipped * master_bytes;
    const uint64_t state_bytes = sizeof(float) >> static_cast<int>(launch_->state_format);
    for (int slot = 0; slot < states_; ++slot) {
      c.state_before[slot] = launch_->state[slot].before + skipped * state_bytes;
      c.state_after[slot] = launch_->state[slot].after + skipped * state_bytes;
      c.scales_before[slot] = launch_->scales[slot].before;
      c.scales_after[slot] = launch_->scales[slot].after;
    }
    if (launch_->parameter != 0) {
      c.parameter = launch_->parameter + skipped * SizeOf(launch_->parameter_dtype);
    }
    c.random_key = launch_->random_key;
    // Tiles of 8-bit states begin with a grain.
    const uint64_t of_thread = HandlesOctets(*launch_) ? kOctet : kVector;
    const uint64_t blocks = BlocksFor((c.first % kStateGrain + c.elements) / of_thread);
    calls_.back().blocks = std::max(calls_.back().blocks, blocks);
  }

  void AddSegment(uint64_t from, uint64_t to, const UpdateSegment& segment) {
    if (Join(from, to, segment)) return;
    auto known = std::find(args_.begin(), args_.end(), segment.args);
    if (runs_ == kMaxRuns || (known == args_.end() && args_.size() == kMaxArgs)) {
      CloseChunk(from);
      if (chunk().elements == 0) DropChunk();
      OpenCall(*launch_);
      OpenChunk(from);
      known = args_.end();
    }
    const auto slot = static_cast<uint32_t>(known - args_.begin());
    if (known == args_.end()) {
      params().args[slot] = launch_->args[segment.args];
      args_.push_back(segment.args);
    }
    const uint64_t first = chunk().first;
    params().run[runs_++] = {static_cast<uint32_t>(from - first), static_cast<uint32_t>(to - first),
                             slot,
                             segment.block_shift - static_cast<uint32_t>(launch_->first_block)};
    ++chunk().runs;
  }

  // Makes the chunk's last run longer, if the segment touches it and has its arguments.
  bool Join(uint64_t from, uint64_t to, const UpdateSegment& segment) {
    if (chunk().runs == 0 || launch_->state_format == StateFormat::kInt8) return false;
    UpdateRun& last = params().run[runs_ - 1];
    if (chunk().first + last.end != from || args_[last.args] != segment.args) return false;
    last.end = static_cast<uint32_t>(to - chunk().first);
    return true;
  }

  std::vector<KernelCall<UpdateParams>> calls_;
  const UpdateLaunch* launch_ = nullptr;  // whose chunk is the last one
  int states_ = 0;                        // of its optimizer
  uint32_t runs_ = 0;                     // of the last call
  std::vector<uint32_t> args_;            // of the last call: launch_->args[args_[i]] is its i-th
};

// Fills in the steps; returns the depth of the stack that they need.
absl::StatusOr<uint32_t> FillSteps(const SumLaunch& launch, SumParams& params) {
  using Kind = ReductionStep::Kind;
  uint32_t depth = 0;
  uint32_t deepest = 0;
  for (const ReductionStep& step : launch.program->steps) {
    if (step.kind == Kind::kAddTop) {
      if (depth < 2) return absl::InvalidArgumentError("a sum's program adds what is not there");
      ++params.step[params.steps - 1].adds;
      --depth;
      continue;
    }
    const bool pushed = step.kind == Kind::kPush;
    if (step.input >= launch.inputs.size() || params.steps == kMaxInputs ||
        (!pushed && depth == 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a sum's program with input ", step.input, " of ", launch.inputs.size()));
    }
    depth += pushed ? 1 : 0;
    deepest = std::max(deepest, depth);
    params.step[params.steps++] = {.input = static_cast<uint8_t>(step.input),
                                   .pushed = static_cast<uint8_t>(pushed ? 1 : 0),
                                   .adds = 0,
                                   .type = static_cast<uint8_t>(launch.inputs[step.input].dtype)};
  }
  if (depth != 1) return absl::InvalidArgumentError("a sum's program without a result");
  return deepest;
}

absl::Status FillInputs(const SumLaunch& launch, SumParams& params) {
  for (size_t i = 0; i < launch.inputs.size(); ++i) {
    const SumInput& input = launch.inputs[i];
    if (input.data == 0) continue;
    ZS_RETURN_IF_ERROR(CheckAddress("input", input.data));
    params.data[i] = input.data;
    params.presence[i] = input.presence;
    params.weight_address[i] = input.weight_address;
    params.weight[i] = input.weight;
  }
  return absl::OkStatus();
}

bool AllOfType(absl::Span<const SumInput> inputs, DType dtype) {
  return std::all_of(inputs.begin(), inputs.end(), [&](const SumInput& input) {
    return input.data == 0 || input.dtype == dtype;
  });
}

}  // namespace

absl::Span<const char* const> KernelNames() { return kNames; }

absl::StatusOr<std::vector<KernelCall<UpdateParams>>> PlanUpdates(
    absl::Span<const UpdateLaunch> launches) {
  UpdatePlanner planner;
  for (const UpdateLaunch& launch : launches) ZS_RETURN_IF_ERROR(planner.Add(launch));
  return planner.Take();
}

absl::StatusOr<KernelCall<SumParams>> PlanSum(const SumLaunch& launch) {
  if (launch.program == nullptr || launch.inputs.empty() || launch.inputs.size() > kMaxSumInputs ||
      launch.program->inputs != launch.inputs.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a sum of ", launch.inputs.size(), " inputs on the device; 1 to ", kMaxSumInputs,
        ", as many as its program's ", launch.program == nullptr ? 0 : launch.program->inputs));
  }
  ZS_RETURN_IF_ERROR(CheckRange(launch.first, launch.elements, kRangeAlignment));
  ZS_RETURN_IF_ERROR(CheckAddress("accumulator", launch.accumulator));
  ZS_RETURN_IF_ERROR(CheckAddress("table of parameters", launch.parameters));
  KernelCall<SumParams> call;
  SumParams& params = call.params;
  ZS_RETURN_IF_ERROR(FillInputs(launch, params));
  ZS_ASSIGN_OR_RETURN(const uint32_t depth, FillSteps(launch, params));
  if (depth > kDeepStack) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sum of ", depth, " levels; at most ", kDeepStack, " on the device"));
  }
  uint64_t of_thread = kOctet;
  if (depth > kShallowStack) {
    call.kernel = kSumAnyDeep;
    of_thread = kVector;
  } else if (AllOfType(launch.inputs, DType::kBfloat16)) {
    call.kernel = kSumBf16;
  } else if (AllOfType(launch.inputs, DType::kFloat16)) {
    call.kernel = kSumFp16;
  } else {
    call.kernel = kSumAny;
    of_thread = kVector;
  }
  params.accumulator_type = static_cast<uint32_t>(launch.accumulator_dtype);
  params.accumulator = launch.accumulator;
  params.before = launch.before;
  params.parameters = launch.parameters;
  params.parameter_count = launch.parameter_count;
  params.first = launch.first;
  params.elements = launch.elements;
  call.blocks = BlocksFor(launch.elements / of_thread);
  return call;
}

absl::StatusOr<KernelCall<MergePresenceParams>> PlanMergePresence(
    const MergePresenceLaunch& launch) {
  if (launch.inputs.size() > kMaxSumInputs) {
    return absl::InvalidArgumentError(
        absl::StrCat("presence of ", launch.inputs.size(), " inputs; at most ", kMaxSumInputs));
  }
  ZS_RETURN_IF_ERROR(CheckAddress("presence", launch.after, sizeof(uint64_t)));
  KernelCall<MergePresenceParams> call{.kernel = kMergePresence, .blocks = 1};
  std::copy(launch.inputs.begin(), launch.inputs.end(), call.params.input);
  call.params.inputs = static_cast<uint32_t>(launch.inputs.size());
  call.params.before = launch.before;
  call.params.after = launch.after;
  return call;
}

absl::StatusOr<KernelCall<SquaresParams>> PlanSquares(const SquaresLaunch& launch) {
  ZS_RETURN_IF_ERROR(CheckRange(launch.first, launch.elements, kGrain));
  ZS_RETURN_IF_ERROR(CheckAddress("accumulator", launch.accumulator));
  ZS_RETURN_IF_ERROR(CheckAddress("table of parameters", launch.parameters));
  ZS_RETURN_IF_ERROR(CheckAddress("place for squares", launch.squares, sizeof(double)));
  const uint64_t grains = launch.elements / kGrain;
  return KernelCall<SquaresParams>{.kernel = kSquares,
                                   .blocks = (grains + kBlockGrains - 1) / kBlockGrains,
                                   .params = {.accumulator = launch.accumulator,
                                              .presence = launch.presence,
                                              .parameters = launch.parameters,
                                              .parameter_count = launch.parameter_count,
                                              .type = static_cast<uint32_t>(launch.dtype),
                                              .first = launch.first,
                                              .grains = grains,
                                              .squares = launch.squares}};
}

absl::StatusOr<KernelCall<ConvertParams>> PlanConvert(const ConvertLaunch& launch) {
  if (launch.elements == 0) return absl::InvalidArgumentError("a conversion of nothing");
  ZS_RETURN_IF_ERROR(CheckAddress("source", launch.from));
  ZS_RETURN_IF_ERROR(CheckAddress("destination", launch.to));
  return KernelCall<ConvertParams>{.kernel = kConvert,
                                   .blocks = BlocksFor((launch.elements + kVector - 1) / kVector),
                                   .params = {.from = launch.from,
                                              .to = launch.to,
                                              .from_type = static_cast<uint32_t>(launch.from_dtype),
                                              .to_type = static_cast<uint32_t>(launch.to_dtype),
                                              .elements = launch.elements}};
}

}  // namespace zeroshard::gpu
