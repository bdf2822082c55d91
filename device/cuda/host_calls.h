// Functions that the driver calls when a stream gets to them (cuLaunchHostFunc).
//
// The driver is given a number, not a pointer: what a stream of a lost device never called is
// dropped with the stream, and a call that comes late finds nothing. One table a process, as the
// driver's threads outlive every object. Any thread.
#ifndef ZEROSHARD_DEVICE_CUDA_HOST_CALLS_H_
#define ZEROSHARD_DEVICE_CUDA_HOST_CALLS_H_

#include <cstdint>
#include <functional>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "device/cuda/driver.h"

namespace zeroshard {

class HostCalls {
 public:
  static HostCalls& Get();

  // A ticket for Run or Drop. `stream` is any number that is the same for all calls of one stream.
  uintptr_t Add(uint64_t stream, std::function<void()> function);
  // Calls the function, if it is still there.
  void Run(uintptr_t ticket);
  void Drop(uintptr_t ticket);
  // All of the stream that were not called.
  void DropStream(uint64_t stream);

 private:
  struct Call {
    uint64_t stream = 0;
    std::function<void()> function;
  };

  absl::Mutex mu_;
  uintptr_t next_ ABSL_GUARDED_BY(mu_) = 1;
  std::unordered_map<uintptr_t, Call> calls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_HOST_CALLS_H_
