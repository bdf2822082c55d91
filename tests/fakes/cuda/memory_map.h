#ifndef ZEROSHARD_TESTS_FAKES_CUDA_MEMORY_MAP_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_MEMORY_MAP_H_

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/fakes/cuda/physical.h"

namespace zeroshard::fake_cuda {

// Memory that an operation of a device touches.
struct Range {
  uint64_t address = 0;
  uint64_t bytes = 0;
  bool writes = false;
  std::string what;
  bool any_device = false;  // copies reach the memory of other devices without access rights
};

enum class HostKind { kAllocated, kRegistered };

struct HostRange {
  uint64_t bytes = 0;
  HostKind kind = HostKind::kRegistered;
  bool read_only = false;
  unsigned flags = 0;
};

// What lies at a device address.
struct Located {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  bool host = false;
  int device = 0;  // of device memory
};

// The address space that host and devices share: device memory has PROT_NONE, except while an
// operation that names it runs (counted, since operations of several streams overlap). Thread-safe.
class MemoryMap {
 public:
  // Gives device addresses back; host memory stays, since its owner may still use it.
  ~MemoryMap();

  // --- Address ranges and mappings (cuMemAddressReserve and the like; addresses are checked) ---
  CUresult Reserve(uint64_t bytes, uint64_t alignment, uint64_t* address);
  CUresult Free(uint64_t address, uint64_t bytes);
  CUresult Map(uint64_t address, uint64_t bytes, std::shared_ptr<Physical> memory);
  CUresult Unmap(uint64_t address, uint64_t bytes);
  CUresult SetAccess(uint64_t address, uint64_t bytes, int device, CUmemAccess_flags flags);
  CUresult GetAccess(uint64_t address, int device, unsigned long long* flags);
  std::shared_ptr<Physical> MemoryAt(uint64_t address);

  // --- cuMemAlloc: a reservation of its own that ends at a guard page ---
  CUresult Allocate(std::shared_ptr<Physical> memory, uint64_t bytes, uint64_t* address);
  CUresult Release(uint64_t address);

  // --- Host memory that devices may touch ---
  CUresult AllocateHost(uint64_t bytes, unsigned flags, void** memory);
  CUresult ReleaseHost(void* memory);
  CUresult RegisterHost(void* memory, uint64_t bytes, unsigned flags);
  CUresult UnregisterHost(void* memory);
  std::optional<HostRange> HostAt(uint64_t address, uint64_t bytes);

  // What is wrong with ranges that an operation of `device` touches, or nothing.
  std::optional<std::string> Check(int device, const std::vector<Range>& ranges);
  // Checks and makes them accessible; then Close must follow.
  std::optional<std::string> Open(int device, const std::vector<Range>& ranges);
  void Close(const std::vector<Range>& ranges);

  std::optional<Located> Locate(uint64_t address);
  // Whether any byte is device memory, which the host cannot touch.
  bool TouchesDevice(uint64_t address, uint64_t bytes);

  // kind, address, bytes of all that is alive.
  struct Live {
    const char* kind;
    uint64_t address;
    uint64_t bytes;
  };
  std::vector<Live> AllLive();

 private:
  struct Reservation {
    uint64_t bytes = 0;
    uint64_t outer = 0;  // with guards
    uint64_t outer_bytes = 0;
    bool allocation = false;  // of cuMemAlloc
  };
  struct Mapping {
    uint64_t bytes = 0;  // exact, may end within a page
    uint64_t pages = 0;  // begin of its first page
    uint64_t page_bytes = 0;
    std::shared_ptr<Physical> memory;
    std::map<int, CUmemAccess_flags> access;
    int open = 0;
  };
  using Mappings = std::map<uint64_t, Mapping>;

  std::optional<std::string> CheckLocked(int device, const Range& range);
  std::optional<std::string> CheckHost(const Range& range);
  std::optional<std::string> CheckMapping(int device, const Range& range, uint64_t begin,
                                          const Mapping& mapping);
  Mappings::iterator MappingAt(uint64_t address);
  // The mappings that [address, address + bytes) consists of exactly; empty when it does not.
  std::vector<Mappings::iterator> WholeMappings(uint64_t address, uint64_t bytes);
  // Keeps the addresses for a while, so that who still uses them is told so.
  void Retire(const Reservation& reservation);
  void DieIfOpen(const Mappings::iterator& mapping, const char* call);

  std::mutex mu_;
  std::map<uint64_t, Reservation> reservations_;  // all guarded by mu_
  Mappings mappings_;
  std::map<uint64_t, HostRange> host_;
  std::deque<Reservation> retired_;  // freed, oldest first
};

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_MEMORY_MAP_H_
