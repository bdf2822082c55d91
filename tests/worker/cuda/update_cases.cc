// Updates: every optimizer, gradient type, master, output and format of states.
#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "tests/worker/cuda/kernel_cases.h"
#include "tests/worker/optim/update_reference.h"
#include "worker/optim/kernels.h"
#include "worker/optim/random_key.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {
namespace {

struct Form {
  std::string name;
  UpdateArrays arrays;
};

void AddForms(const OptimizerInfo& optimizer, std::string_view name, MasterKind master, bool output,
              DType out_dtype, std::vector<Form>& forms) {
  static uint16_t some_output;
  for (DType grad : kAllDTypes) {
    for (const StateFormat states :
         {StateFormat::kFloat32, StateFormat::kBfloat16, StateFormat::kInt8}) {
      if (states == StateFormat::kInt8 && !optimizer.eight_bit) continue;
      UpdateArrays arrays;
      arrays.grad_dtype = grad;
      arrays.master = master;
      arrays.state_format = states;
      arrays.out = output ? &some_output : nullptr;
      arrays.out_dtype = out_dtype;
      forms.push_back({absl::StrCat(Abs(optimizer.name), ", ", Abs(name), ", gradient ",
                                    Abs(DTypeName(grad)), ", states ", static_cast<int>(states)),
                       arrays});
    }
  }
}

std::vector<Form> FormsOf(const OptimizerInfo& optimizer) {
  std::vector<Form> forms;
  AddForms(optimizer, "fp32", MasterKind::kFloat32, false, DType::kFloat32, forms);
  AddForms(optimizer, "fp32 to fp32", MasterKind::kFloat32, true, DType::kFloat32, forms);
  AddForms(optimizer, "fp32 to bf16", MasterKind::kFloat32, true, DType::kBfloat16, forms);
  AddForms(optimizer, "fp32 to fp16", MasterKind::kFloat32, true, DType::kFloat16, forms);
  AddForms(optimizer, "canonical", MasterKind::kFloat32Canonical, false, DType::kFloat32, forms);
  AddForms(optimizer, "canonical to bf16", MasterKind::kFloat32Canonical, true, DType::kBfloat16,
           forms);
  AddForms(optimizer, "stochastic", MasterKind::kStochastic, false, DType::kFloat32, forms);
  AddForms(optimizer, "stochastic to bf16", MasterKind::kStochastic, true, DType::kBfloat16, forms);
  return forms;
}

// Parameters of any size at multiples of 16, and the padding between them, which is as a parameter
// without a gradient. `is_padding` says of each which it is.
std::vector<uint64_t> RandomOffsets(std::mt19937_64& random, uint64_t elements, uint64_t largest,
                                    std::vector<bool>& is_padding) {
  std::vector<uint64_t> offsets = {0};
  while (offsets.back() < elements) {
    const uint64_t begin = offsets.back();
    const uint64_t end = std::min(elements, begin + 1 + random() % largest);
    offsets.push_back(end);
    is_padding.push_back(false);
    const uint64_t next = (end + 15) / 16 * 16;
    if (next == end) continue;
    offsets.push_back(next);
    is_padding.push_back(true);
  }
  return offsets;
}

// The arrays of one run, on the host and on the device.
class DeviceTensors {
 public:
  DeviceTensors(KernelDevice& device, const UpdateTensors& tensors)
      : device_(device), tensors_(tensors) {}

  // `in_place`: the image after is the one before.
  absl::Status Put(bool in_place) {
    ZS_ASSIGN_OR_RETURN(grad_, device_.PutAll(tensors_.grad));
    ZS_RETURN_IF_ERROR(PutPair(Master(tensors_), in_place, master_));
    for (int slot = 0; slot < kMaxStateSlots; ++slot) {
      ZS_RETURN_IF_ERROR(PutPair(tensors_.state[slot], in_place, state_[slot]));
      ZS_RETURN_IF_ERROR(PutPair(Bytes(tensors_.absmax[slot]), in_place, scales_[slot]));
    }
    if (tensors_.out.empty()) return absl::OkStatus();
    ZS_ASSIGN_OR_RETURN(out_, device_.PutAll(tensors_.out));
    return absl::OkStatus();
  }

  // For the elements [first, end).
  UpdateLaunch Launch(const UpdatePass& pass, uint64_t first, uint64_t end) const {
    const UpdateArrays& form = tensors_.form;
    UpdateLaunch launch;
    launch.kind = pass.kind;
    launch.first = first;
    launch.elements = end - first;
    launch.grad = grad_ + first * SizeOf(form.grad_dtype);
    launch.grad_dtype = form.grad_dtype;
    launch.master_kind = form.master;
    const bool stochastic = form.master == MasterKind::kStochastic;
    launch.master = Skip(master_, first * (stochastic ? 2 : 4));
    launch.state_format = form.state_format;
    const uint64_t state_bytes = 4u >> static_cast<int>(form.state_format);
    launch.first_block = tensors_.block_of[first];
    launch.blocks = tensors_.block_of[end - 1] + 1 - launch.first_block;
    for (int slot = 0; slot < kMaxStateSlots; ++slot) {
      launch.state[slot] = Skip(state_[slot], first * state_bytes);
      launch.scales[slot] = Skip(scales_[slot], launch.first_block * sizeof(float));
    }
    launch.parameter = out_ == 0 ? 0 : out_ + first * SizeOf(form.out_dtype);
    launch.parameter_dtype = form.out_dtype;
    launch.segments = pass.segments;
    launch.args = pass.args;
    launch.grad_scale = pass.grad_scale;
    launch.random_key = pass.random_key;
    return launch;
  }

  absl::Status Compare(const std::string& name, const UpdateTensors& expected) {
    ZS_RETURN_IF_ERROR(CompareOne(name + ": master", master_.after, Master(expected)));
    ZS_RETURN_IF_ERROR(CompareOne(name + ": parameter", out_, expected.out));
    for (int slot = 0; slot < kMaxStateSlots; ++slot) {
      const std::string what = absl::StrCat(name, ": state ", slot);
      ZS_RETURN_IF_ERROR(
          CompareOne(what + " scales", scales_[slot].after, Bytes(expected.absmax[slot])));
      ZS_RETURN_IF_ERROR(CompareOne(what, state_[slot].after, expected.state[slot]));
    }
    return absl::OkStatus();
  }

 private:
  template <class T>
  static std::vector<std::byte> Bytes(const std::vector<T>& values) {
    const auto* begin = reinterpret_cast<const std::byte*>(values.data());
    return {begin, begin + values.size() * sizeof(T)};
  }
  static std::vector<std::byte> Master(const UpdateTensors& tensors) {
    return tensors.param.empty() ? Bytes(tensors.high) : Bytes(tensors.param);
  }
  static DeviceArrayPair Skip(const DeviceArrayPair& pair, uint64_t bytes) {
    if (pair.before == 0) return {};
    return {pair.before + bytes, pair.after + bytes};
  }

  absl::Status PutPair(const std::vector<std::byte>& before, bool in_place, DeviceArrayPair& pair) {
    if (before.empty()) return absl::OkStatus();
    ZS_ASSIGN_OR_RETURN(pair.before, device_.PutAll(before));
    pair.after = pair.before;
    if (in_place) return absl::OkStatus();
    ZS_ASSIGN_OR_RETURN(pair.after,
                        device_.PutAll(std::vector<std::byte>(before.size(), std::byte{0xcd})));
    return absl::OkStatus();
  }

  absl::Status CompareOne(const std::string& what, DeviceAddress address,
                          const std::vector<std::byte>& expected) {
    if (expected.empty()) return absl::OkStatus();
    std::vector<std::byte> found(expected.size());
    ZS_RETURN_IF_ERROR(device_.GetAll(address, found));
    return SameBytes(what, found.data(), expected.data(), expected.size());
  }

  KernelDevice& device_;
  const UpdateTensors& tensors_;
  DeviceAddress grad_ = 0;
  DeviceAddress out_ = 0;
  DeviceArrayPair master_;
  DeviceArrayPair state_[kMaxStateSlots];
  DeviceArrayPair scales_[kMaxStateSlots];
};

// What a launch does beside the pass of the host: the parameters of elements that it leaves alone.
void RewriteOthers(const std::vector<UpdateSegment>& segments, UpdateTensors& tensors) {
  if (tensors.out.empty()) return;
  uint64_t at = 0;
  const auto rewrite = [&](uint64_t end) {
    if (tensors.form.master == MasterKind::kStochastic) {
      std::copy_n(reinterpret_cast<const std::byte*>(tensors.high.data() + at), 2 * (end - at),
                  tensors.out.data() + 2 * at);
      return;
    }
    ConvertElements(tensors.param.data() + at, DType::kFloat32,
                    tensors.out.data() + at * SizeOf(tensors.form.out_dtype),
                    tensors.form.out_dtype, end - at);
  };
  for (const UpdateSegment& segment : segments) {
    rewrite(segment.begin);
    at = segment.end;
  }
  rewrite(tensors.elements());
}

// Elements of no segment are copied bit by bit: also NaNs that no update would have stored.
void PutOddBits(std::mt19937_64& random, const std::vector<bool>& is_padding,
                UpdateTensors& tensors) {
  if (tensors.form.state_format == StateFormat::kInt8) return;
  const uint64_t bytes = tensors.form.state_format == StateFormat::kFloat32 ? 4 : 2;
  for (size_t i = 0; i < is_padding.size(); ++i) {
    if (!is_padding[i]) continue;
    for (std::vector<std::byte>& state : tensors.state) {
      if (state.empty()) continue;
      std::byte* const last = state.data() + tensors.offsets[i + 1] * bytes - 1;
      *last = std::byte{0x7f};
      last[-1] = static_cast<std::byte>(random() | 0x80);
    }
  }
}

struct UpdateScenario {
  uint64_t elements = 1536;
  uint64_t largest = 400;
  int groups = 3;
  Values values = Values::kAny;
  bool in_place = false;
};

absl::Status CheckUpdate(KernelDevice& device, const Form& form, OptimizerKind kind,
                         const UpdateScenario& scenario, std::mt19937_64& random) {
  std::vector<bool> is_padding;
  const std::vector<uint64_t> offsets =
      RandomOffsets(random, scenario.elements, scenario.largest, is_padding);
  UpdateTensors tensors = RandomTensors(random, form.arrays, kind, offsets, scenario.values);
  PutOddBits(random, is_padding, tensors);
  UpdateTensors expected = tensors;
  const std::vector<UpdateArgs> args = RandomArgs(random, kind, scenario.groups);
  std::vector<int> updated;
  for (const bool padding : is_padding) {
    const int group = static_cast<int>(random() % (scenario.groups + 1)) - 1;
    updated.push_back(padding ? -1 : group);
  }
  const std::vector<UpdateSegment> segments = tensors.Segments(updated);
  const UpdatePass pass = {.kind = kind,
                           .arrays = expected.Arrays(),
                           .segments = segments,
                           .args = args,
                           .grad_scale = 0.3f,
                           .random_key = RandomKey(7, random(), 3)};
  ApplyUpdate(pass, 0, scenario.elements);
  RewriteOthers(segments, expected);

  DeviceTensors on_device(device, tensors);
  ZS_RETURN_IF_ERROR(on_device.Put(scenario.in_place));
  std::vector<UpdateLaunch> launches;
  for (uint64_t at = 0; at < scenario.elements;) {
    const uint64_t end = std::min(scenario.elements, at + 256 * (1 + random() % 4));
    launches.push_back(on_device.Launch(pass, at, end));
    at = end;
  }
  ZS_RETURN_IF_ERROR(device.Update(absl::MakeConstSpan(launches).first(1)));
  ZS_RETURN_IF_ERROR(device.Update(absl::MakeConstSpan(launches).subspan(1)));
  ZS_RETURN_IF_ERROR(on_device.Compare(form.name, expected));
  return device.Clear();
}

absl::Status CheckOptimizer(KernelDevice& device, OptimizerKind kind) {
  std::mt19937_64 random(static_cast<uint64_t>(kind) + 1);
  for (const Form& form : FormsOf(GetOptimizerInfo(kind))) {
    for (const UpdateScenario& scenario :
         {UpdateScenario{.values = Values::kOrdinary, .in_place = true}, UpdateScenario{}}) {
      ZS_RETURN_IF_ERROR(CheckUpdate(device, form, kind, scenario, random));
    }
  }
  return absl::OkStatus();
}

// More runs, and more arguments, than fit into one call.
absl::Status CheckManyRuns(KernelDevice& device, OptimizerKind kind) {
  std::mt19937_64 random(99);
  for (const Form& form : FormsOf(GetOptimizerInfo(kind))) {
    if (form.arrays.grad_dtype != DType::kFloat32) continue;
    for (const int groups : {2, 40}) {
      const UpdateScenario scenario{.elements = 8192, .largest = 40, .groups = groups};
      ZS_RETURN_IF_ERROR(CheckUpdate(device, form, kind, scenario, random));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<KernelCase> UpdateCases() {
  std::vector<KernelCase> cases;
  for (const OptimizerInfo& info : AllOptimizers()) {
    const OptimizerKind kind = info.kind;
    cases.push_back({absl::StrCat("update ", Abs(info.name)),
                     [kind](KernelDevice& device) { return CheckOptimizer(device, kind); }});
  }
  cases.push_back({"update of many parameters", [](KernelDevice& device) {
                     return CheckManyRuns(device, OptimizerKind::kAdamW);
                   }});
  return cases;
}

}  // namespace zeroshard
