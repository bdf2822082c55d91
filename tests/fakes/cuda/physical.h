#ifndef ZEROSHARD_TESTS_FAKES_CUDA_PHYSICAL_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_PHYSICAL_H_

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/fakes/cuda/settings.h"

namespace zeroshard::fake_cuda {

inline constexpr uint64_t kGranularity = uint64_t{2} << 20;

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Physical memory of a device: a file whose open description all descriptors and mappings share, in
// every process. A lock on that description tells others that the memory is alive; the kernel drops
// it with the last descriptor or mapping, however the processes ended.
struct Physical {
  Fd fd;
  int device = 0;  // index in the node
  uint64_t bytes = 0;
  CUmemAllocationProp prop = {};

  // The same open description once more, close-on-exec; -1 on failure.
  int DuplicateFd() const;
};

// The memory of the devices of a node (a directory), or of this process alone. Thread-safe.
class Pool {
 public:
  Pool(const Settings& settings);

  // Null with *error CUDA_ERROR_OUT_OF_MEMORY when the device has not `bytes` left.
  std::shared_ptr<Physical> Create(int device, uint64_t bytes, const CUmemAllocationProp& prop,
                                   CUresult* error);

  // Of a descriptor that another process exported; null when it is none.
  std::shared_ptr<Physical> Import(int fd);

  uint64_t Used(int device);

 private:
  struct Witness {  // a second description of memory, which tells whether the first one lives
    Fd fd;
    int device = 0;
    uint64_t bytes = 0;
  };

  uint64_t UsedLocked(int device);
  uint64_t UsedOfNode(int device);
  Fd NewFile(int device, uint64_t bytes);

  const uint64_t memory_;
  const bool poison_;
  const std::string node_;
  Fd node_lock_;
  std::mutex mu_;
  std::vector<Witness> witnesses_;  // guarded by mu_; of a private pool
  uint64_t files_ = 0;              // guarded by mu_
};

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_PHYSICAL_H_
