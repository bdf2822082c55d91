// Speed of the numeric kernels in one process, for orientation while working on them; the judged
// figures come from tests/bench/run. Arguments: threads. Bytes per second count each array once per
// read and once per write, so the figures of one shape compare directly.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "device/cpu/thread_pool.h"
#include "worker/grad_norm.h"
#include "worker/optim/kernels.h"
#include "worker/protected_pass.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {
namespace {

constexpr uint32_t kChunks = 64;
constexpr uint64_t kChunkElements = uint64_t{1} << 18;
constexpr uint64_t kElements = kChunks * kChunkElements;
constexpr int64_t kBytesPerElement = 28;  // AdamW, bf16 in and out: 14 read, 14 written

struct Tensors {
  std::vector<uint16_t> grad = std::vector<uint16_t>(kElements, FloatToBf16(0.01f));
  std::vector<uint16_t> out = std::vector<uint16_t>(kElements, 1);
  std::vector<float> param = std::vector<float>(kElements, 1.0f);
  std::vector<float> state0 = std::vector<float>(kElements, 0.01f);
  std::vector<float> state1 = std::vector<float>(kElements, 0.01f);
};

Tensors& SharedTensors() {
  static Tensors tensors;
  return tensors;
}

std::unique_ptr<ThreadPool> Pool(const benchmark::State& state) {
  return *ThreadPool::Create({.threads = static_cast<int>(state.range(0))});
}

void SetFigures(benchmark::State& state, int64_t bytes_per_element) {
  const auto elements = static_cast<int64_t>(state.iterations() * kElements);
  state.SetItemsProcessed(elements);
  state.SetBytesProcessed(elements * bytes_per_element);
}

// The memory traffic of AdamW with next to no arithmetic: the limit.
__attribute__((target_clones("avx2", "default"), optimize("O3"))) void Stream(
    const uint16_t* __restrict grad, float* __restrict param, float* __restrict state0,
    float* __restrict state1, uint16_t* __restrict out, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) {
    param[i] += 1.0f;
    state0[i] += 1.0f;
    state1[i] += 1.0f;
    out[i] = static_cast<uint16_t>(grad[i] + 1);
  }
}

void BM_ShapeMatchedStream(benchmark::State& state) {
  Tensors& t = SharedTensors();
  const auto pool = Pool(state);
  for (auto _ : state) {
    pool->ParallelFor(kChunks, [&](size_t chunk, int) {
      const uint64_t begin = chunk * kChunkElements;
      Stream(t.grad.data(), t.param.data(), t.state0.data(), t.state1.data(), t.out.data(), begin,
             begin + kChunkElements);
    });
  }
  SetFigures(state, kBytesPerElement);
}

UpdatePass AdamWPass(const UpdateSegment& segment, const UpdateArgs& args) {
  Tensors& t = SharedTensors();
  UpdatePass pass;
  pass.arrays = {.grad = t.grad.data(),
                 .grad_dtype = DType::kBfloat16,
                 .param = t.param.data(),
                 .state = {t.state0.data(), t.state1.data()},
                 .out = t.out.data(),
                 .out_dtype = DType::kBfloat16};
  pass.segments = absl::MakeConstSpan(&segment, 1);
  pass.args = absl::MakeConstSpan(&args, 1);
  return pass;
}

void BM_AdamWUnprotected(benchmark::State& state) {
  const UpdateSegment segment = {.begin = 0, .end = kElements, .args = 0};
  const UpdateArgs args = MakeUpdateArgs({.weight_decay = 0.1}, 10);
  const UpdatePass pass = AdamWPass(segment, args);
  const auto pool = Pool(state);
  for (auto _ : state) {
    pool->ParallelFor(kChunks, [&](size_t chunk, int) {
      ApplyUpdate(pass, chunk * kChunkElements, (chunk + 1) * kChunkElements);
    });
  }
  SetFigures(state, kBytesPerElement);
}

void BM_AdamWProtected(benchmark::State& state) {
  Tensors& t = SharedTensors();
  const UpdateSegment segment = {.begin = 0, .end = kElements, .args = 0};
  const UpdateArgs args = MakeUpdateArgs({.weight_decay = 0.1}, 10);
  const UpdatePass pass = AdamWPass(segment, args);
  const auto pool = Pool(state);
  const size_t bytes = UndoArea::BytesNeeded(8, kChunks);
  std::vector<std::byte> memory(bytes + 64);
  auto* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  const UndoArea area = *UndoArea::Format(aligned, bytes, 8, kChunks);
  std::vector<uint32_t> chunks(kChunks);
  std::iota(chunks.begin(), chunks.end(), 0);
  uint64_t tag = 0;
  for (auto _ : state) {
    RunProtected(
        ProtectedPass{area, {.tag = ++tag}}, chunks,
        [&](size_t items, auto fn) { pool->ParallelFor(items, fn); },
        [&](uint32_t chunk) {
          UndoChunk arrays;
          arrays.array_count = 3;
          float* bases[] = {t.param.data(), t.state0.data(), t.state1.data()};
          for (int i = 0; i < 3; ++i) {
            arrays.arrays[i] = {reinterpret_cast<std::byte*>(bases[i] + chunk * kChunkElements), 4};
          }
          arrays.elements = kChunkElements;
          return arrays;
        },
        [&](uint32_t chunk, uint64_t begin, uint64_t end) {
          ApplyUpdate(pass, chunk * kChunkElements + begin, chunk * kChunkElements + end);
        });
  }
  SetFigures(state, kBytesPerElement);
}

// Every form of the pass, unprotected: optimizer, MasterKind, StateFormat. The arrays are reused
// for all of them; the fp32 states' memory holds the other formats, too.
void BM_Form(benchmark::State& state) {
  Tensors& t = SharedTensors();
  static std::vector<uint16_t> high(kElements, 0x3f80), low(kElements, 0);
  static std::vector<float> scales[kMaxStateSlots] = {
      std::vector<float>(kElements / kStateBlock, 1.0f),
      std::vector<float>(kElements / kStateBlock, 1.0f)};
  const UpdateSegment segment = {.begin = 0, .end = kElements, .args = 0};
  const UpdateArgs args = MakeUpdateArgs({.weight_decay = 0.1, .momentum = 0.9}, 10);
  UpdatePass pass = AdamWPass(segment, args);
  pass.kind = static_cast<OptimizerKind>(state.range(0));
  pass.arrays.master = static_cast<MasterKind>(state.range(1));
  pass.arrays.state_format = static_cast<StateFormat>(state.range(2));
  pass.arrays.high = high.data();
  pass.arrays.low = low.data();
  for (int slot = 0; slot < kMaxStateSlots; ++slot) {
    pass.arrays.absmax[slot] = scales[slot].data();
  }
  for (auto _ : state) ApplyUpdate(pass, 0, kElements);
  state.SetLabel(std::string(GetOptimizerInfo(pass.kind).name));
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kElements));
  std::memset(t.state0.data(), 0, kElements * 4);
  std::memset(t.state1.data(), 0, kElements * 4);
}

// Sum of bf16 ranks into an fp32 accumulator; second argument: ranks.
void BM_Reduce(benchmark::State& state) {
  Tensors& t = SharedTensors();
  const auto ranks = static_cast<uint32_t>(state.range(1));
  std::vector<std::vector<uint16_t>> inputs(ranks, t.grad);
  std::vector<ReduceSource> sources;
  for (const auto& input : inputs) {
    sources.push_back({.data = input.data(), .dtype = DType::kBfloat16});
  }
  const ReductionProgram program = ReductionTree::Create(ranks, ranks)->RankPlan().Program();
  const auto pool = Pool(state);
  for (auto _ : state) {
    pool->ParallelFor(kChunks, [&](size_t chunk, int) {
      Reduce(program, sources, {.data = t.param.data()}, chunk * kChunkElements,
             (chunk + 1) * kChunkElements);
    });
  }
  SetFigures(state, 2 * static_cast<int64_t>(ranks) + 4);
}

void BM_SquaredNorm(benchmark::State& state) {
  Tensors& t = SharedTensors();
  const ElementRange all = {.begin = 0, .end = kElements};
  const auto pool = Pool(state);
  std::vector<ExactSum> sums(static_cast<size_t>(pool->lanes()));
  for (auto _ : state) {
    pool->ParallelFor(kChunks, [&](size_t chunk, int lane) {
      constexpr uint64_t kGrains = kChunkElements / kNormGrain;
      AddSquares({.data = t.param.data(), .elements = kElements}, absl::MakeConstSpan(&all, 1),
                 chunk * kGrains, (chunk + 1) * kGrains, sums[static_cast<size_t>(lane)]);
    });
  }
  SetFigures(state, 4);
}

BENCHMARK(BM_ShapeMatchedStream)->Arg(1)->Arg(2)->UseRealTime();
BENCHMARK(BM_AdamWUnprotected)->Arg(1)->Arg(2)->UseRealTime();
BENCHMARK(BM_AdamWProtected)->Arg(1)->Arg(2)->UseRealTime();
BENCHMARK(BM_Form)->ArgsProduct({{0}, {0, 1, 2, 3}, {0, 1, 2}});
BENCHMARK(BM_Form)->Args({3, 2, 1})->Args({4, 0, 0})->Args({5, 2, 2});
BENCHMARK(BM_Reduce)->Args({1, 2})->Args({2, 2})->Args({2, 4})->UseRealTime();
BENCHMARK(BM_SquaredNorm)->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace zeroshard

BENCHMARK_MAIN();
