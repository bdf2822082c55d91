// Gives the fake device the product's kernels, with the memory that each launch may touch.
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/fake_kernels.h"
#include "tests/fakes/cuda/host_kernels.h"
#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/kernel_params.h"

namespace zeroshard::fake_cuda {
namespace {

using gpu::kTypeFloat32;

constexpr uint64_t kPresenceBytes = gpu::kPresenceWords * sizeof(uint64_t);
constexpr uint64_t kPlaceBytes = 16;
constexpr uint64_t kGrain = 256;

uint64_t BytesOf(uint32_t type, uint64_t elements) {
  return elements * (type == kTypeFloat32 ? 4 : 2);
}

// Collects ranges; one of address 0 is none.
class Ranges {
 public:
  void Reads(const char* what, uint64_t address, uint64_t bytes) {
    if (address != 0 && bytes != 0) ranges_.push_back({address, bytes, RangeAccess::kRead, what});
  }
  void Writes(const char* what, uint64_t address, uint64_t bytes) {
    if (address != 0 && bytes != 0) ranges_.push_back({address, bytes, RangeAccess::kWrite, what});
  }
  std::vector<KernelRange> Take() { return std::move(ranges_); }

 private:
  std::vector<KernelRange> ranges_;
};

// Scales of the blocks that a chunk's runs touch.
void AddScales(const gpu::UpdateParams& p, const gpu::UpdateChunk& chunk, int slot,
               Ranges& ranges) {
  for (uint32_t i = chunk.first_run; i < chunk.first_run + chunk.runs; ++i) {
    const gpu::UpdateRun& run = p.run[i];
    const auto index = [&](uint64_t element) {
      return static_cast<uint32_t>((chunk.first + element) / kGrain) + run.block_shift;
    };
    const uint64_t begin = index(run.begin) * sizeof(float);
    const uint64_t bytes = (index(run.end - 1) + 1) * sizeof(float) - begin;
    ranges.Reads("scales before", chunk.scales_before[slot] + begin, bytes);
    ranges.Writes("scales after", chunk.scales_after[slot] + begin, bytes);
  }
}

std::vector<KernelRange> RangesOf(const gpu::UpdateParams& p, uint64_t state_bytes) {
  Ranges ranges;
  for (uint32_t i = 0; i < p.chunks; ++i) {
    const gpu::UpdateChunk& c = p.chunk[i];
    ranges.Reads("gradient", c.grad, BytesOf(p.grad_type, c.elements));
    const uint64_t master_bytes = c.elements * (p.master == gpu::kMasterStochastic ? 2 : 4);
    ranges.Reads("master before", c.master_before, master_bytes);
    ranges.Writes("master after", c.master_after, master_bytes);
    ranges.Writes("parameter", c.parameter, BytesOf(p.parameter_type, c.elements));
    for (int slot = 0; slot < kMaxStateSlots; ++slot) {
      ranges.Reads("state before", c.state_before[slot], c.elements * state_bytes);
      ranges.Writes("state after", c.state_after[slot], c.elements * state_bytes);
      if (state_bytes == 1 && c.scales_after[slot] != 0) AddScales(p, c, slot, ranges);
    }
  }
  return ranges.Take();
}

std::vector<KernelRange> RangesOf(const gpu::SumParams& p) {
  Ranges ranges;
  for (uint32_t at = 0; at < p.steps; ++at) {
    const gpu::SumStep& step = p.step[at];
    if (p.data[step.input] == 0) continue;
    ranges.Reads("input", p.data[step.input], BytesOf(step.type, p.elements));
    ranges.Reads("presence of an input", p.presence[step.input], kPresenceBytes);
    ranges.Reads("weight of an input", p.weight_address[step.input], sizeof(float));
  }
  ranges.Reads("parameters", p.parameters, p.parameter_count * kPlaceBytes);
  ranges.Reads("presence before", p.before, kPresenceBytes);
  ranges.Writes("accumulator", p.accumulator, BytesOf(p.accumulator_type, p.elements));
  return ranges.Take();
}

std::vector<KernelRange> RangesOf(const gpu::MergePresenceParams& p) {
  Ranges ranges;
  for (uint32_t i = 0; i < p.inputs; ++i) ranges.Reads("presence", p.input[i], kPresenceBytes);
  ranges.Reads("presence before", p.before, kPresenceBytes);
  ranges.Writes("presence after", p.after, kPresenceBytes);
  return ranges.Take();
}

std::vector<KernelRange> RangesOf(const gpu::SquaresParams& p) {
  Ranges ranges;
  ranges.Reads("accumulator", p.accumulator, BytesOf(p.type, p.grains * kGrain));
  ranges.Reads("presence", p.presence, kPresenceBytes);
  ranges.Reads("parameters", p.parameters, p.parameter_count * kPlaceBytes);
  ranges.Writes("squares", p.squares, p.grains * sizeof(double));
  return ranges.Take();
}

std::vector<KernelRange> RangesOf(const gpu::ConvertParams& p) {
  Ranges ranges;
  ranges.Reads("source", p.from, BytesOf(p.from_type, p.elements));
  ranges.Writes("destination", p.to, BytesOf(p.to_type, p.elements));
  return ranges.Take();
}

// Bytes of an element of a state, by the kernel's name; 0 for one that is no update.
uint64_t StateBytes(const std::string& name) {
  if (name.ends_with("_int8")) return 1;
  if (name.ends_with("_bf16")) return 2;
  return 4;
}

template <class Params>
const Params& ParamsOf(void** params) {
  return *static_cast<const Params*>(params[0]);
}

std::vector<KernelRange> RangesOfLaunch(const std::string& name, void** params) {
  if (name.starts_with("zs_update_")) {
    return RangesOf(ParamsOf<gpu::UpdateParams>(params), StateBytes(name));
  }
  if (name.starts_with("zs_sum_")) return RangesOf(ParamsOf<gpu::SumParams>(params));
  if (name == "zs_squares") return RangesOf(ParamsOf<gpu::SquaresParams>(params));
  if (name == "zs_convert") return RangesOf(ParamsOf<gpu::ConvertParams>(params));
  return RangesOf(ParamsOf<gpu::MergePresenceParams>(params));
}

bool RegisterAll() {
  for (const HostKernel& kernel : HostKernels()) {
    FakeKernel fake;
    fake.parameter_bytes = {kernel.params_bytes};
    fake.run = [&kernel](void** params, Dim3 grid, Dim3 block, unsigned) {
      if (block.x != gpu::kBlockThreads || block.y != 1 || grid.z != 1) std::abort();
      kernel.run(params[0], grid.x, grid.y);
    };
    fake.pointers = [name = std::string(kernel.name)](void** params) {
      return RangesOfLaunch(name, params);
    };
    fake.max_threads_per_block = gpu::kBlockThreads;
    RegisterFakeKernel(kernel.name, std::move(fake));
  }
  return true;
}

[[maybe_unused]] const bool registered = RegisterAll();

}  // namespace
}  // namespace zeroshard::fake_cuda
