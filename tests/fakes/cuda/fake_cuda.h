#ifndef ZEROSHARD_TESTS_FAKES_CUDA_FAKE_CUDA_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_FAKE_CUDA_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

// What libcuda.so.1 of this folder exports beside the driver's functions: control for tests that
// link //tests/fakes/cuda:fake_cuda (the same library that product code then finds by dlopen), and
// the door by which other fakes (NCCL) put work on a stream. See docs/testing.md, "The fake GPU".

extern "C" {

// Starts over with these settings (the text of ZEROSHARD_FAKE_CUDA; null: the environment's):
// faults, counts and losses are forgotten, operations that hang end with an error, streams are
// drained. Handles and memory of before must not be in use; what leaked is reported by
// FakeCudaAllocations.
void FakeCudaReset(const char* settings);

// How often `api` (as in cuda.h, without the version: "cuMemCreate") was called since the reset.
// Also the pseudo-calls "operations" (work done by streams) and "pageable copies" (asynchronous
// copies from or to host memory that is not registered, which a driver makes synchronously).
uint64_t FakeCudaCalls(const char* api);

// Live objects of this process: fills at most `capacity`, returns how many there are.
typedef struct FakeCudaAllocation {
  const char* kind;  // "memory", "mapping", "reservation", "host", "registered", "stream", "event",
                     // "module", "handle"
  uint64_t address;  // or the handle
  uint64_t bytes;
} FakeCudaAllocation;
int FakeCudaAllocations(FakeCudaAllocation* out, int capacity);

// Device memory (or registered host memory) that an operation touches.
typedef struct FakeCudaRange {
  uint64_t address;
  uint64_t bytes;
  int writes;        // 0: read only
  const char* what;  // names it in a complaint
} FakeCudaRange;

// Puts host code on a stream, in order with all else there: `run(user)` is called once on the
// stream's thread with the ranges accessible, also when it has to wait for other processes (it
// should then look at FakeCudaGivenUp() now and then). A result other than CUDA_SUCCESS loses the
// device. When the device was lost before its turn `run` is not called; `drop(user)` (may be null)
// is then.
CUresult FakeCudaEnqueue(CUstream stream, const char* name, const FakeCudaRange* ranges, int count,
                         CUresult (*run)(void* user), void (*drop)(void* user), void* user);

// On a stream's thread: true when its device was lost or the fake was reset, so that waiting is
// vain.
int FakeCudaGivenUp(void);

}  // extern "C"

namespace zeroshard::fake_cuda {

inline void ResetFakeCuda(const std::string& settings) { FakeCudaReset(settings.c_str()); }

inline std::vector<FakeCudaAllocation> LiveAllocations() {
  std::vector<FakeCudaAllocation> found(static_cast<size_t>(FakeCudaAllocations(nullptr, 0)));
  found.resize(
      static_cast<size_t>(FakeCudaAllocations(found.data(), static_cast<int>(found.size()))));
  return found;
}

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_FAKE_CUDA_H_
