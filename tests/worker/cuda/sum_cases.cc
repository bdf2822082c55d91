// Sums, presence bits, squares and conversions.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "tests/worker/cuda/kernel_cases.h"
#include "tests/worker/random_values.h"
#include "worker/grad_norm.h"
#include "worker/reduce_kernel.h"
#include "worker/reduction_tree.h"

namespace zeroshard {
namespace {

using PresenceWords = std::array<uint64_t, kDevicePresenceWords>;

struct TestUnit {
  std::vector<DeviceParameter> parameters;
  uint64_t elements = 0;  // whole grains
};

bool IsSet(const PresenceWords& words, size_t position) {
  return (words[position / 64] >> (position % 64) & 1) != 0;
}

// Some parameters are empty, some have one element; 16-element alignment as in a layout.
TestUnit RandomUnit(std::mt19937_64& random, size_t parameters, uint64_t largest) {
  TestUnit unit;
  uint64_t at = 0;
  for (size_t i = 0; i < parameters; ++i) {
    const uint64_t size = random() % 8 == 0 ? random() % 2 : 1 + random() % largest;
    unit.parameters.push_back({at, at + size});
    at = (at + size + 15) / 16 * 16;
  }
  unit.elements = std::max<uint64_t>(256, (at + 255) / 256 * 256);
  return unit;
}

PresenceWords RandomPresence(std::mt19937_64& random, const TestUnit& unit, int absent_in) {
  PresenceWords words = {};
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    if (absent_in == 0 || random() % absent_in != 0) words[i / 64] |= uint64_t{1} << (i % 64);
  }
  return words;
}

void ClearPadding(const TestUnit& unit, DType dtype, std::vector<std::byte>& data) {
  std::vector<bool> used(unit.elements);
  for (const DeviceParameter& p : unit.parameters) {
    for (uint64_t e = p.begin; e < p.end; ++e) used[e] = true;
  }
  for (uint64_t e = 0; e < unit.elements; ++e) {
    if (!used[e]) std::fill_n(data.begin() + e * SizeOf(dtype), SizeOf(dtype), std::byte{0});
  }
}

struct Input {
  bool nothing = false;
  DType dtype = DType::kFloat32;
  std::vector<std::byte> data;
  PresenceWords presence = {};
  bool all_present = false;  // the device is not told of presence
  float weight = 1.0f;
  bool weight_on_device = false;
};

struct SumScenario {
  uint32_t ranks = 1;
  uint32_t group = 1;
  std::vector<DType> dtypes = {DType::kFloat32};  // of the inputs, in turn
  DType accumulator = DType::kFloat32;
  bool weighted = false;
  int absent_in = 3;  // one parameter in so many; 0: none
  size_t parameters = 9;
  uint64_t largest = 300;
  int micro_steps = 2;
  Values values = Values::kAny;

  std::string Name() const {
    return absl::StrCat("sum of ", ranks, " in groups of ", group, ", ", Abs(DTypeName(dtypes[0])),
                        dtypes.size() > 1 ? " and others" : "", " to ", Abs(DTypeName(accumulator)),
                        weighted ? ", weighted" : "", ", 1 in ", absent_in, " absent");
  }
};

Input RandomInput(std::mt19937_64& random, const SumScenario& scenario, const TestUnit& unit,
                  uint32_t rank) {
  Input input;
  input.dtype = scenario.dtypes[rank % scenario.dtypes.size()];
  input.data = Encode(input.dtype, RandomFloats(random, unit.elements, scenario.values));
  input.presence = RandomPresence(random, unit, scenario.absent_in);
  if (scenario.absent_in == 0) input.all_present = random() % 2 == 0;
  if (scenario.absent_in != 0 && random() % 16 == 0) input.nothing = true;
  if (scenario.weighted) input.weight = 0.5f + static_cast<float>(random() % 100) / 64.0f;
  input.weight_on_device = random() % 2 == 0;
  return input;
}

// What the host does: a program for each parameter.
void SumOnHost(const ReductionPlan& plan, const std::vector<Input>& inputs, const TestUnit& unit,
               const PresenceWords& before, DType dtype, std::vector<std::byte>& accumulator) {
  std::vector<ReduceSource> sources;
  for (const Input& input : inputs) {
    sources.push_back({input.data.data(), input.dtype, input.weight != 1.0f, input.weight});
  }
  const auto present = std::make_unique<bool[]>(inputs.size());
  for (size_t position = 0; position < unit.parameters.size(); ++position) {
    const DeviceParameter& p = unit.parameters[position];
    for (size_t i = 0; i < inputs.size(); ++i) {
      present[i] = !inputs[i].nothing && IsSet(inputs[i].presence, position);
    }
    const auto mode = IsSet(before, position) ? AccumulateMode::kAdd : AccumulateMode::kStore;
    Reduce(plan.Program(absl::MakeConstSpan(present.get(), inputs.size())), sources,
           {.data = accumulator.data(), .dtype = dtype, .mode = mode}, p.begin, p.end);
  }
}

absl::StatusOr<std::vector<SumInput>> PutInputs(KernelDevice& device,
                                                const std::vector<Input>& inputs) {
  std::vector<SumInput> result;
  for (const Input& input : inputs) {
    SumInput& put = result.emplace_back();
    put.dtype = input.dtype;
    put.weight = input.weight;
    if (input.nothing) continue;
    ZS_ASSIGN_OR_RETURN(put.data, device.PutAll(input.data));
    if (!input.all_present) {
      ZS_ASSIGN_OR_RETURN(put.presence, device.Put(&input.presence, sizeof(input.presence)));
    }
    if (input.weight_on_device) {
      put.weight = -1.0f;
      ZS_ASSIGN_OR_RETURN(put.weight_address, device.Put(&input.weight, sizeof(input.weight)));
    }
  }
  return result;
}

// The same sum in ranges, as an owner of a slice has them.
absl::Status SumInRanges(KernelDevice& device, SumLaunch launch, std::vector<SumInput> inputs,
                         uint64_t elements, std::mt19937_64& random) {
  const DeviceAddress accumulator = launch.accumulator;
  for (uint64_t at = 0; at < elements;) {
    const uint64_t end = std::min(elements, at + 16 * (1 + random() % 64));
    std::vector<SumInput> part = inputs;
    for (SumInput& input : part) {
      if (input.data != 0) input.data += at * SizeOf(input.dtype);
    }
    launch.inputs = part;
    launch.first = at;
    launch.elements = end - at;
    launch.accumulator = accumulator + at * SizeOf(launch.accumulator_dtype);
    ZS_RETURN_IF_ERROR(device.Sum(launch));
    at = end;
  }
  return absl::OkStatus();
}

absl::Status CheckSum(KernelDevice& device, const SumScenario& scenario, std::mt19937_64& random) {
  const TestUnit unit = RandomUnit(random, scenario.parameters, scenario.largest);
  ZS_ASSIGN_OR_RETURN(const ReductionTree tree,
                      ReductionTree::Create(scenario.ranks, scenario.group));
  const ReductionPlan plan = tree.RankPlan();
  const ReductionProgram program = plan.Program();
  std::vector<std::byte> expected =
      Encode(scenario.accumulator, RandomFloats(random, unit.elements, Values::kAny));
  ClearPadding(unit, scenario.accumulator, expected);
  PresenceWords before = {};
  SumLaunch launch;
  launch.program = &program;
  launch.parameter_count = static_cast<uint32_t>(unit.parameters.size());
  launch.accumulator_dtype = scenario.accumulator;
  ZS_ASSIGN_OR_RETURN(launch.parameters, device.PutAll(unit.parameters));
  ZS_ASSIGN_OR_RETURN(launch.accumulator, device.PutAll(expected));
  ZS_ASSIGN_OR_RETURN(const DeviceAddress presence, device.Put(&before, sizeof(before)));
  for (int micro_step = 0; micro_step < scenario.micro_steps; ++micro_step) {
    std::vector<Input> inputs;
    for (uint32_t rank = 0; rank < scenario.ranks; ++rank) {
      inputs.push_back(RandomInput(random, scenario, unit, rank));
      if (inputs.back().all_present) inputs.back().presence = RandomPresence(random, unit, 0);
    }
    SumOnHost(plan, inputs, unit, before, scenario.accumulator, expected);
    ZS_ASSIGN_OR_RETURN(const std::vector<SumInput> put, PutInputs(device, inputs));
    launch.before = micro_step == 0 && random() % 2 == 0 ? 0 : presence;
    ZS_RETURN_IF_ERROR(SumInRanges(device, launch, put, unit.elements, random));
    std::vector<DeviceAddress> merged;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].nothing) {
        merged.push_back(0);
        continue;
      }
      ZS_ASSIGN_OR_RETURN(merged.emplace_back(),
                          device.Put(&inputs[i].presence, sizeof(PresenceWords)));
      for (size_t w = 0; w < before.size(); ++w) before[w] |= inputs[i].presence[w];
    }
    ZS_RETURN_IF_ERROR(
        device.MergePresence({.inputs = merged, .before = launch.before, .after = presence}));
    PresenceWords found;
    ZS_RETURN_IF_ERROR(device.Get(presence, &found, sizeof(found)));
    ZS_RETURN_IF_ERROR(SameBytes(scenario.Name() + ": presence", &found, &before, sizeof(found)));
  }
  std::vector<std::byte> found(expected.size());
  ZS_RETURN_IF_ERROR(device.GetAll(launch.accumulator, found));
  ZS_RETURN_IF_ERROR(SameBytes(scenario.Name(), found.data(), expected.data(), found.size()));
  return device.Clear();
}

absl::Status CheckSums(KernelDevice& device, std::vector<DType> dtypes) {
  std::mt19937_64 random(dtypes.size() * 10 + static_cast<uint64_t>(dtypes[0]));
  for (uint32_t ranks = 1; ranks <= 9; ++ranks) {
    for (const uint32_t group : {1u, 2u, 3u, ranks}) {
      if (group > ranks) continue;
      for (const DType accumulator : kAllDTypes) {
        for (const int absent_in : {0, 3}) {
          const SumScenario scenario{.ranks = ranks,
                                     .group = group,
                                     .dtypes = dtypes,
                                     .accumulator = accumulator,
                                     .weighted = random() % 2 == 0,
                                     .absent_in = absent_in};
          ZS_RETURN_IF_ERROR(CheckSum(device, scenario, random));
        }
      }
    }
  }
  return absl::OkStatus();
}

// As many inputs and levels, and as many parameters, as there may be.
absl::Status CheckLargeSums(KernelDevice& device) {
  std::mt19937_64 random(64);
  for (const uint32_t group : {1u, 5u, 8u, 33u, 64u}) {
    const SumScenario scenario{.ranks = 64,
                               .group = group,
                               .dtypes = {DType::kBfloat16},
                               .weighted = true,
                               .parameters = 7};
    ZS_RETURN_IF_ERROR(CheckSum(device, scenario, random));
  }
  const SumScenario scenario{.ranks = 3, .group = 3, .parameters = 1024, .largest = 20};
  return CheckSum(device, scenario, random);
}

absl::Status CheckSquares(KernelDevice& device, DType dtype, Values values, int absent_in,
                          std::mt19937_64& random) {
  const TestUnit unit = RandomUnit(random, 20, 900);
  std::vector<std::byte> data = Encode(dtype, RandomFloats(random, unit.elements, values));
  const PresenceWords presence = RandomPresence(random, unit, absent_in);
  std::vector<ElementRange> included;
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    const DeviceParameter& p = unit.parameters[i];
    if (IsSet(presence, i) && p.begin < p.end) included.push_back({p.begin, p.end});
  }
  const uint64_t grains = unit.elements / kNormGrain;
  const uint64_t first = random() % grains;
  SquaresLaunch launch;
  launch.dtype = dtype;
  launch.first = first * kNormGrain;
  launch.elements = unit.elements - launch.first;
  launch.parameter_count = static_cast<uint32_t>(unit.parameters.size());
  ZS_ASSIGN_OR_RETURN(launch.parameters, device.PutAll(unit.parameters));
  ZS_ASSIGN_OR_RETURN(launch.accumulator, device.PutAll(data));
  launch.accumulator += launch.first * SizeOf(dtype);
  if (absent_in != 0) {
    ZS_ASSIGN_OR_RETURN(launch.presence, device.Put(&presence, sizeof(presence)));
  }
  std::vector<double> found(grains - first, -1.0);
  ZS_ASSIGN_OR_RETURN(launch.squares, device.PutAll(found));
  ZS_RETURN_IF_ERROR(device.Squares(launch));
  ZS_RETURN_IF_ERROR(device.GetAll(launch.squares, found));
  for (uint64_t grain = first; grain < grains; ++grain) {
    ExactSum sum;
    AddSquares({data.data(), dtype, unit.elements}, included, grain, grain + 1, sum);
    const double expected = sum.ToDouble();
    const double actual = found[grain - first];
    if (expected != expected && actual != actual) continue;
    ZS_RETURN_IF_ERROR(
        SameBytes(absl::StrCat("squares of ", Abs(DTypeName(dtype)), ", grain ", grain), &actual,
                  &expected, sizeof(expected)));
  }
  return device.Clear();
}

absl::Status CheckAllSquares(KernelDevice& device) {
  std::mt19937_64 random(5);
  for (const DType dtype : kAllDTypes) {
    for (const Values values : {Values::kOrdinary, Values::kAny}) {
      for (const int absent_in : {0, 3}) {
        for (int round = 0; round < 4; ++round) {
          ZS_RETURN_IF_ERROR(CheckSquares(device, dtype, values, absent_in, random));
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckConversions(KernelDevice& device) {
  std::mt19937_64 random(6);
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const uint64_t elements : {1, 3, 4, 1023, 5000}) {
        std::vector<std::byte> source = Encode(from, RandomFloats(random, elements, Values::kAny));
        std::vector<std::byte> expected(elements * SizeOf(to));
        ConvertElements(source.data(), from, expected.data(), to, elements);
        std::vector<std::byte> found(expected.size());
        ConvertLaunch launch{.from_dtype = from, .to_dtype = to, .elements = elements};
        ZS_ASSIGN_OR_RETURN(launch.from, device.PutAll(source));
        ZS_ASSIGN_OR_RETURN(launch.to, device.PutAll(found));
        ZS_RETURN_IF_ERROR(device.Convert(launch));
        ZS_RETURN_IF_ERROR(device.GetAll(launch.to, found));
        ZS_RETURN_IF_ERROR(SameBytes(absl::StrCat("conversion of ", elements, " from ",
                                                  Abs(DTypeName(from)), " to ", Abs(DTypeName(to))),
                                     found.data(), expected.data(), found.size()));
        ZS_RETURN_IF_ERROR(device.Clear());
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<KernelCase> SumCases() {
  std::vector<KernelCase> cases;
  for (const DType dtype : kAllDTypes) {
    cases.push_back({absl::StrCat("sum of ", Abs(DTypeName(dtype))),
                     [dtype](KernelDevice& device) { return CheckSums(device, {dtype}); }});
  }
  cases.push_back({"sum of several types", [](KernelDevice& device) {
                     return CheckSums(device, {DType::kBfloat16, DType::kFloat32, DType::kFloat16});
                   }});
  cases.push_back({"sum of 64 ranks, of 1,024 parameters", CheckLargeSums});
  cases.push_back({"squares", CheckAllSquares});
  cases.push_back({"conversions", CheckConversions});
  return cases;
}

std::vector<KernelCase> AllKernelCases() {
  std::vector<KernelCase> cases = UpdateCases();
  for (KernelCase& sum_case : SumCases()) cases.push_back(std::move(sum_case));
  return cases;
}

absl::Status RunKernelCase(const KernelCase& kernel_case, KernelDevice& device) {
  const absl::Status status = kernel_case.run(device);
  const absl::Status cleared = device.Clear();
  return status.ok() ? cleared : status;
}

absl::Status SameBytes(const std::string& what, const void* found, const void* expected,
                       size_t bytes) {
  const auto* a = static_cast<const uint8_t*>(found);
  const auto* b = static_cast<const uint8_t*>(expected);
  const auto difference = std::mismatch(a, a + bytes, b).first - a;
  if (static_cast<size_t>(difference) == bytes) return absl::OkStatus();
  const size_t word = static_cast<size_t>(difference) / 4 * 4;
  const size_t count = std::min<size_t>(4, bytes - word);
  uint32_t words[2] = {};
  std::memcpy(&words[0], a + word, count);
  std::memcpy(&words[1], b + word, count);
  return absl::DataLossError(absl::StrCat(what, ": byte ", difference, " of ", bytes, ": found ",
                                          absl::Hex(words[0], absl::kZeroPad8), ", expected ",
                                          absl::Hex(words[1], absl::kZeroPad8)));
}

}  // namespace zeroshard
