// A worker's AdamW pass over one large unit, by itself: what benchmarks of the optimizer step time.
#ifndef ZEROSHARD_TESTS_BENCH_ADAMW_JOB_H_
#define ZEROSHARD_TESTS_BENCH_ADAMW_JOB_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/shared_memory.h"
#include "device/cpu/thread_pool.h"
#include "storage/undo_area.h"
#include "worker/optim/kernels.h"

namespace zeroshard::bench {

// Where the arrays lie: in memory files, as a worker's do, or in private memory of huge pages, as a
// worker's are where the kernel gives memory files any
// (/sys/kernel/mm/transparent_hugepage/shmem_enabled).
enum class Pages : uint8_t { kMemoryFiles, kHuge };

// bf16 parameters and gradients, fp32 states, and the master either fp32 (28 bytes of memory
// traffic an element) or split (26), under the undo record.
// One thread at a time.
class AdamWJob {
 public:
  // `elements` is a multiple of the chunk, 64 Ki.
  AdamWJob(MasterKind master, uint64_t elements, int threads, Pages pages = Pages::kMemoryFiles);

  // One optimizer step over all elements, protected.
  void Update();

  // Reads and writes the same bytes as Update does with next to no arithmetic; changes nothing.
  void Stream();

  // Runs one update and compares it, on elements spread over all chunks, with the formula in fp64
  // from the values before: an empty string, or what is wrong.
  std::string Check();

  uint64_t elements() const { return elements_; }
  // Memory traffic of one update without the undo record.
  int64_t bytes_per_element() const { return split() ? 26 : 28; }

 private:
  struct Sample {
    double p = 0, m = 0, v = 0, g = 0;
  };
  bool split() const { return master_ == MasterKind::kSplit; }
  std::byte* Allocate(const char* name, uint64_t bytes);
  std::byte* AllocateHuge(uint64_t bytes);
  void Fill();
  UndoChunk UndoOf(uint32_t chunk) const;
  Sample SampleAt(uint64_t element) const;

  const MasterKind master_;
  const uint64_t elements_;
  const Pages pages_;
  std::unique_ptr<ThreadPool> pool_;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::vector<MappedRegion> regions_;
  std::vector<std::unique_ptr<std::byte, Free>> blocks_;
  UpdateArrays arrays_;
  std::vector<UndoArea> undo_;  // one
  std::vector<uint32_t> chunks_;
  uint64_t step_ = 0;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_ADAMW_JOB_H_
