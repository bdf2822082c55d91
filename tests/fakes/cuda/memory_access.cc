// The part of MemoryMap that operations use: checks, opening and closing, host ranges.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tests/fakes/cuda/errors.h"
#include "tests/fakes/cuda/memory_map.h"

namespace zeroshard::fake_cuda {
namespace {

constexpr uint64_t kPage = 4096;

std::string Name(const Range& range) {
  return range.what + " at " + Hex(range.address) + " (" + std::to_string(range.bytes) + " bytes)";
}

// The entry of a map of ranges that holds `address`, or end.
template <typename Map>
typename Map::iterator Holder(Map& map, uint64_t address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address - it->first < it->second.bytes ? it : map.end();
}

template <typename Map>
bool Overlaps(Map& map, uint64_t address, uint64_t bytes) {
  const auto next = map.lower_bound(address);
  if (next != map.end() && next->first - address < bytes) return true;
  return Holder(map, address) != map.end();
}

int Protection(const std::map<int, CUmemAccess_flags>& access) {
  int protection = PROT_NONE;
  for (const auto& [device, flags] : access) {
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection = PROT_READ | PROT_WRITE;
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READ) protection |= PROT_READ;
  }
  return protection;
}

void Protect(uint64_t address, uint64_t bytes, int protection) {
  if (mprotect(reinterpret_cast<void*>(address), bytes, protection) != 0) {
    Die(std::string("mprotect of device memory: ") + std::strerror(errno));
  }
}

bool IsMapped(uint64_t address, uint64_t bytes) {
  const uint64_t begin = address / kPage * kPage;
  std::vector<unsigned char> resident((address + bytes - begin + kPage - 1) / kPage);
  return mincore(reinterpret_cast<void*>(begin), address + bytes - begin, resident.data()) == 0;
}

// Pinning faults every page in, for writing unless it is registered to be read only; false when the
// pages can not be written. A kernel without these calls (before 5.14) is taken at its word.
bool Pin(uint64_t address, uint64_t bytes, bool read_only) {
  void* const begin = reinterpret_cast<void*>(address / kPage * kPage);
  const uint64_t pages = (address + bytes + kPage - 1) / kPage * kPage - address / kPage * kPage;
  if (!read_only && madvise(begin, pages, MADV_POPULATE_WRITE) == 0) return true;
  return madvise(begin, pages, MADV_POPULATE_READ) == 0 ? read_only : errno == EINVAL;
}

}  // namespace

MemoryMap::Mappings::iterator MemoryMap::MappingAt(uint64_t address) {
  return Holder(mappings_, address);
}

std::optional<std::string> MemoryMap::CheckHost(const Range& range) {
  const auto host = Holder(host_, range.address);
  if (range.bytes > host->second.bytes - (range.address - host->first)) {
    return Name(range) + " goes past the end of the registered host memory at " + Hex(host->first) +
           " (" + std::to_string(host->second.bytes) + " bytes)";
  }
  if (range.writes && host->second.read_only) {
    return Name(range) + " is host memory that was registered to be read only";
  }
  return std::nullopt;
}

std::optional<std::string> MemoryMap::CheckMapping(int device, const Range& range, uint64_t begin,
                                                   const Mapping& mapping) {
  if (mapping.access.empty()) {
    return Name(range) + ": no cuMemSetAccess since the mapping at " + Hex(begin);
  }
  if (range.any_device) {
    if (!range.writes || (Protection(mapping.access) & PROT_WRITE) != 0) return std::nullopt;
    return Name(range) + " is written, but was mapped to be read only";
  }
  const auto access = mapping.access.find(device);
  if (access == mapping.access.end() || access->second == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
    return Name(range) + " is memory of device " + std::to_string(mapping.memory->device) +
           " that device " + std::to_string(device) + " has no access to";
  }
  if (range.writes && access->second != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return Name(range) + " is written, but was mapped to be read only";
  }
  return std::nullopt;
}

std::optional<std::string> MemoryMap::CheckLocked(int device, const Range& range) {
  if (range.bytes == 0) return std::nullopt;
  if (Holder(host_, range.address) != host_.end()) return CheckHost(range);
  uint64_t address = range.address;
  const uint64_t end = range.address + range.bytes;
  while (address < end) {
    const auto it = MappingAt(address);
    if (it == mappings_.end()) {
      if (address > range.address) return Name(range) + " goes past the end of its allocation";
      if (Holder(reservations_, address) != reservations_.end()) {
        return Name(range) + " is a reserved device address without memory";
      }
      for (const Reservation& freed : retired_) {
        if (address - freed.outer < freed.outer_bytes) {
          return Name(range) + " is device memory that was freed";
        }
      }
      return Name(range) + (IsMapped(address, 1)
                                ? " is host memory that is not registered, not device memory"
                                : " is no memory");
    }
    std::optional<std::string> wrong = CheckMapping(device, range, it->first, it->second);
    if (wrong.has_value()) return wrong;
    address = it->first + it->second.bytes;
  }
  return std::nullopt;
}

std::optional<std::string> MemoryMap::Check(int device, const std::vector<Range>& ranges) {
  std::lock_guard<std::mutex> lock(mu_);
  for (const Range& range : ranges) {
    std::optional<std::string> wrong = CheckLocked(device, range);
    if (wrong.has_value()) return wrong;
  }
  return std::nullopt;
}

std::optional<std::string> MemoryMap::Open(int device, const std::vector<Range>& ranges) {
  std::lock_guard<std::mutex> lock(mu_);
  for (const Range& range : ranges) {
    std::optional<std::string> wrong = CheckLocked(device, range);
    if (wrong.has_value()) return wrong;
  }
  for (const Range& range : ranges) {
    if (range.bytes == 0 || Holder(host_, range.address) != host_.end()) continue;
    for (uint64_t address = range.address; address < range.address + range.bytes;) {
      const auto it = MappingAt(address);
      if (it->second.open++ == 0) {
        Protect(it->second.pages, it->second.page_bytes, Protection(it->second.access));
      }
      address = it->first + it->second.bytes;
    }
  }
  return std::nullopt;
}

// Of the same ranges: mappings that are open can not have gone.
void MemoryMap::Close(const std::vector<Range>& ranges) {
  std::lock_guard<std::mutex> lock(mu_);
  for (const Range& range : ranges) {
    for (uint64_t address = range.address; address < range.address + range.bytes;) {
      const auto it = MappingAt(address);
      if (it == mappings_.end()) break;  // host memory
      if (--it->second.open == 0) Protect(it->second.pages, it->second.page_bytes, PROT_NONE);
      address = it->first + it->second.bytes;
    }
  }
}

CUresult MemoryMap::AllocateHost(uint64_t bytes, unsigned flags, void** memory) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* const map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> lock(mu_);
  host_[reinterpret_cast<uint64_t>(map)] = {bytes, HostKind::kAllocated, false, flags};
  *memory = map;
  return CUDA_SUCCESS;
}

CUresult MemoryMap::ReleaseHost(void* memory) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = host_.find(reinterpret_cast<uint64_t>(memory));
  if (it == host_.end() || it->second.kind != HostKind::kAllocated) return CUDA_ERROR_INVALID_VALUE;
  munmap(memory, it->second.bytes);
  host_.erase(it);
  return CUDA_SUCCESS;
}

CUresult MemoryMap::RegisterHost(void* memory, uint64_t bytes, unsigned flags) {
  const auto address = reinterpret_cast<uint64_t>(memory);
  if (bytes == 0 || address + bytes < address) return CUDA_ERROR_INVALID_VALUE;
  const bool read_only = (flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
  std::lock_guard<std::mutex> lock(mu_);
  if (Overlaps(host_, address, bytes)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (Overlaps(mappings_, address, bytes) || !IsMapped(address, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!Pin(address, bytes, read_only)) return CUDA_ERROR_INVALID_VALUE;
  host_[address] = {bytes, HostKind::kRegistered, read_only, flags};
  return CUDA_SUCCESS;
}

CUresult MemoryMap::UnregisterHost(void* memory) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = host_.find(reinterpret_cast<uint64_t>(memory));
  if (it == host_.end() || it->second.kind != HostKind::kRegistered) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  host_.erase(it);
  return CUDA_SUCCESS;
}

std::optional<HostRange> MemoryMap::HostAt(uint64_t address, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = Holder(host_, address);
  if (it == host_.end() || bytes > it->second.bytes - (address - it->first)) return std::nullopt;
  return it->second;
}

std::optional<Located> MemoryMap::Locate(uint64_t address) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto host = Holder(host_, address);
  if (host != host_.end()) return Located{host->first, host->second.bytes, true, 0};
  const auto it = MappingAt(address);
  if (it == mappings_.end()) return std::nullopt;
  return Located{it->first, it->second.bytes, false, it->second.memory->device};
}

bool MemoryMap::TouchesDevice(uint64_t address, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  return bytes > 0 && Overlaps(reservations_, address, bytes);
}

std::vector<MemoryMap::Live> MemoryMap::AllLive() {
  std::lock_guard<std::mutex> lock(mu_);
  std::vector<Live> live;
  for (const auto& [address, reservation] : reservations_) {
    live.push_back({reservation.allocation ? "memory" : "reservation", address, reservation.bytes});
  }
  for (const auto& [address, mapping] : mappings_) {
    if (reservations_.count(address) == 0 || !reservations_[address].allocation) {
      live.push_back({"mapping", address, mapping.bytes});
    }
  }
  for (const auto& [address, host] : host_) {
    live.push_back(
        {host.kind == HostKind::kAllocated ? "host" : "registered", address, host.bytes});
  }
  return live;
}

}  // namespace zeroshard::fake_cuda
