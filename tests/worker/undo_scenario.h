// A training loop in miniature over shared memory, for tests that kill it: every step runs one
// protected pass, an optimizer update or `acc += sum`, over all chunks and then commits.
#ifndef ZEROSHARD_TESTS_WORKER_UNDO_SCENARIO_H_
#define ZEROSHARD_TESTS_WORKER_UNDO_SCENARIO_H_

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "device/cpu/thread_pool.h"
#include "tests/worker/random_values.h"
#include "worker/optim/kernels.h"
#include "worker/protected_pass.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {

struct ScenarioOptions {
  // An optimizer's pass, or with accumulate the sum of two ranks added to the fp32 parameter array.
  OptimizerKind kind = OptimizerKind::kAdamW;
  bool accumulate = false;
  DType grad_dtype = DType::kBfloat16;
  uint32_t lanes = 3;
  uint32_t chunks = 7;
  uint64_t chunk_elements = 1000;
  uint32_t group_elements = kDefaultUndoGroup;
  uint64_t steps = 4;
};

class Scenario {
 public:
  explicit Scenario(const ScenarioOptions& options)
      : options_(options), elements_(options.chunks * options.chunk_elements) {
    undo_bytes_ = UndoArea::BytesNeeded(options.lanes, options.chunks);
    bytes_ = sizeof(Header) + undo_bytes_ + elements_ * (4 + 4 + 4 + 2);
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ZS_CHECK(memory != MAP_FAILED, "mmap");
    memory_ = static_cast<std::byte*>(memory);
    new (memory_) Header;
    ZS_CHECK(UndoArea::Format(undo(), undo_bytes_, options.lanes, options.chunks).ok(), "format");
    std::mt19937_64 random(7);
    const auto initial = RandomFloats(random, elements_, Values::kOrdinary);
    std::memcpy(param(), initial.data(), elements_ * 4);
    for (auto& grad : grads_) {
      grad = Encode(options.grad_dtype, RandomFloats(random, elements_, Values::kOrdinary));
    }
  }
  ~Scenario() { munmap(memory_, bytes_); }
  Scenario(const Scenario&) = delete;
  Scenario& operator=(const Scenario&) = delete;

  bool finished() const { return header()->committed == options_.steps; }
  uint64_t committed() const { return header()->committed; }
  uint64_t torn_groups() const { return header()->torn; }

  // What a process does: recover, then the steps that are left, with `lanes` lanes.
  template <class ParallelFor, class Probe>
  void Run(ParallelFor&& parallel_for, Probe&& probe) {
    const UndoArea area = *UndoArea::Adopt(undo(), undo_bytes_);
    const auto torn = area.Recover([&](const UndoKey&, uint32_t chunk) { return ArraysOf(chunk); });
    ZS_CHECK(torn.ok(), "recover");
    header()->torn += torn->size();
    std::vector<uint32_t> chunks(options_.chunks);
    std::iota(chunks.begin(), chunks.end(), 0);
    while (!finished()) {
      const uint64_t step = header()->committed + 1;
      RunProtected(
          ProtectedPass{area, {.tag = step, .op = 1}}, chunks, parallel_for,
          [&](uint32_t chunk) { return ArraysOf(chunk); },
          [&](uint32_t chunk, uint64_t begin, uint64_t end) { Update(step, chunk, begin, end); },
          probe);
      header()->committed = step;
    }
  }

  // Updates the elements [begin, end) of a chunk.
  void Update(uint64_t step, uint32_t chunk, uint64_t begin, uint64_t end) {
    const uint64_t base = chunk * options_.chunk_elements;
    if (options_.accumulate) {
      static const ReductionProgram kProgram = ReductionTree::Create(2, 2)->RankPlan().Program();
      const ReduceSource sources[] = {
          {.data = grads_[step % 3].data(), .dtype = options_.grad_dtype},
          {.data = grads_[(step + 1) % 3].data(), .dtype = options_.grad_dtype}};
      Reduce(kProgram, sources, {.data = param(), .mode = AccumulateMode::kAdd}, base + begin,
             base + end);
      return;
    }
    const UpdateArgs args = MakeUpdateArgs({.weight_decay = 0.1, .momentum = 0.9, .dampening = 0.1},
                                           static_cast<int64_t>(step));
    const UpdateSegment segment = {.begin = 0, .end = elements_, .args = 0};
    UpdatePass pass;
    pass.kind = options_.kind;
    pass.arrays = {.grad = grads_[step % 3].data(),
                   .grad_dtype = options_.grad_dtype,
                   .param = param(),
                   .state = {param() + elements_, param() + 2 * elements_},
                   .out = param() + 3 * elements_,
                   .out_dtype = DType::kBfloat16};
    pass.segments = absl::MakeConstSpan(&segment, 1);
    pass.args = absl::MakeConstSpan(&args, 1);
    pass.grad_scale = 0.5f;
    ApplyUpdate(pass, base + begin, base + end);
  }

  // Parameters, states and rounded parameters.
  std::vector<std::byte> Result() const {
    const auto* begin = reinterpret_cast<const std::byte*>(param());
    return {begin, begin + elements_ * 14};
  }

  UndoChunk ArraysOf(uint32_t chunk) const {
    UndoChunk arrays;
    arrays.array_count =
        1 + (options_.accumulate ? 0 : GetOptimizerInfo(options_.kind).state_slots);
    for (uint32_t i = 0; i < arrays.array_count; ++i) {
      float* array = param() + i * elements_ + chunk * options_.chunk_elements;
      arrays.arrays[i] = {.data = reinterpret_cast<std::byte*>(array), .element_bytes = 4};
    }
    arrays.elements = options_.chunk_elements;
    arrays.group_elements = options_.group_elements;
    return arrays;
  }

  const ScenarioOptions& options() const { return options_; }

 private:
  struct alignas(64) Header {
    std::atomic<uint64_t> committed = 0;
    std::atomic<uint64_t> torn = 0;
  };

  Header* header() const { return reinterpret_cast<Header*>(memory_); }
  std::byte* undo() const { return memory_ + sizeof(Header); }
  float* param() const { return reinterpret_cast<float*>(memory_ + sizeof(Header) + undo_bytes_); }

  const ScenarioOptions options_;
  const uint64_t elements_;
  size_t undo_bytes_ = 0;
  size_t bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::vector<std::byte> grads_[3];
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_UNDO_SCENARIO_H_
