#include "tests/fakes/cuda/memory_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tests/fakes/cuda/errors.h"

namespace zeroshard::fake_cuda {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kAllocationAlignment = 256;  // the least that cuMemAlloc promises
constexpr size_t kRetired = 256;                // freed ranges that are not used again yet

uint64_t RoundUp(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Gives pages back to what they were before a mapping: reserved, inaccessible.
void MakeInaccessible(uint64_t address, uint64_t bytes) {
  if (mmap(Pointer(address), bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    Die(std::string("cannot unmap device memory: ") + std::strerror(errno));
  }
}

void MapInaccessible(uint64_t address, uint64_t bytes, int fd) {
  if (mmap(Pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    Die(std::string("cannot map device memory: ") + std::strerror(errno));
  }
  madvise(Pointer(address), bytes, MADV_DONTFORK);
}

}  // namespace

MemoryMap::~MemoryMap() {
  for (const auto& [address, reservation] : reservations_) {
    munmap(Pointer(reservation.outer), reservation.outer_bytes);
  }
  for (const Reservation& reservation : retired_) {
    munmap(Pointer(reservation.outer), reservation.outer_bytes);
  }
}

void MemoryMap::Retire(const Reservation& reservation) {
  MakeInaccessible(reservation.outer, reservation.outer_bytes);
  retired_.push_back(reservation);
  if (retired_.size() <= kRetired) return;
  munmap(Pointer(retired_.front().outer), retired_.front().outer_bytes);
  retired_.pop_front();
}

CUresult MemoryMap::Reserve(uint64_t bytes, uint64_t alignment, uint64_t* address) {
  alignment = std::max(alignment, kGranularity);
  if (bytes == 0 || bytes % kGranularity != 0 || (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Reservation reservation;
  reservation.bytes = bytes;
  reservation.outer_bytes = bytes + 2 * alignment;  // at least a page of guard on both sides
  void* const outer = mmap(nullptr, reservation.outer_bytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (outer == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  reservation.outer = reinterpret_cast<uint64_t>(outer);
  *address = RoundUp(reservation.outer + kPage, alignment);
  std::lock_guard<std::mutex> lock(mu_);
  reservations_[*address] = reservation;
  return CUDA_SUCCESS;
}

CUresult MemoryMap::Free(uint64_t address, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || it->second.bytes != bytes || it->second.allocation) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto inside = mappings_.lower_bound(address);
  if (inside != mappings_.end() && inside->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  Retire(it->second);
  reservations_.erase(it);
  return CUDA_SUCCESS;
}

CUresult MemoryMap::Map(uint64_t address, uint64_t bytes, std::shared_ptr<Physical> memory) {
  std::lock_guard<std::mutex> lock(mu_);
  if (bytes == 0 || bytes % kGranularity != 0 || address % kGranularity != 0 ||
      bytes > memory->bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto reservation = reservations_.upper_bound(address);
  if (reservation == reservations_.begin()) return CUDA_ERROR_INVALID_VALUE;
  --reservation;
  const uint64_t offset = address - reservation->first;
  if (reservation->second.allocation || offset > reservation->second.bytes ||
      bytes > reservation->second.bytes - offset) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (next != mappings_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second.bytes > address) return CUDA_ERROR_INVALID_VALUE;
  }
  MapInaccessible(address, bytes, memory->fd.get());
  Mapping& mapping = mappings_[address];
  mapping.bytes = bytes;
  mapping.pages = address;
  mapping.page_bytes = bytes;
  mapping.memory = std::move(memory);
  return CUDA_SUCCESS;
}

std::vector<MemoryMap::Mappings::iterator> MemoryMap::WholeMappings(uint64_t address,
                                                                    uint64_t bytes) {
  std::vector<Mappings::iterator> whole;
  const uint64_t end = address + bytes;
  for (auto it = mappings_.find(address); it != mappings_.end() && it->first == address; ++it) {
    whole.push_back(it);
    address += it->second.bytes;
    if (address >= end) break;
  }
  if (address != end) whole.clear();
  return whole;
}

void MemoryMap::DieIfOpen(const Mappings::iterator& mapping, const char* call) {
  if (mapping->second.open == 0) return;
  Die(std::string(call) + " of device memory at " + Hex(mapping->first) +
      " while an operation of a stream uses it");
}

CUresult MemoryMap::Unmap(uint64_t address, uint64_t bytes) {
  std::vector<std::shared_ptr<Physical>> released;  // outlives the lock
  std::lock_guard<std::mutex> lock(mu_);
  const std::vector<Mappings::iterator> whole = WholeMappings(address, bytes);
  if (whole.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& it : whole) DieIfOpen(it, "cuMemUnmap");
  for (const auto& it : whole) {
    MakeInaccessible(it->second.pages, it->second.page_bytes);
    released.push_back(std::move(it->second.memory));
    mappings_.erase(it);
  }
  return CUDA_SUCCESS;
}

CUresult MemoryMap::SetAccess(uint64_t address, uint64_t bytes, int device,
                              CUmemAccess_flags flags) {
  std::lock_guard<std::mutex> lock(mu_);
  const std::vector<Mappings::iterator> whole = WholeMappings(address, bytes);
  if (whole.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& it : whole) it->second.access[device] = flags;
  return CUDA_SUCCESS;
}

CUresult MemoryMap::GetAccess(uint64_t address, int device, unsigned long long* flags) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = MappingAt(address);
  if (it == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  const auto access = it->second.access.find(device);
  *flags = access == it->second.access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : access->second;
  return CUDA_SUCCESS;
}

std::shared_ptr<Physical> MemoryMap::MemoryAt(uint64_t address) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = MappingAt(address);
  return it == mappings_.end() ? nullptr : it->second.memory;
}

CUresult MemoryMap::Allocate(std::shared_ptr<Physical> memory, uint64_t bytes, uint64_t* address) {
  Reservation reservation;
  const uint64_t pages = RoundUp(bytes, kPage);
  reservation.outer_bytes = pages + 2 * kPage;
  reservation.allocation = true;
  void* const outer = mmap(nullptr, reservation.outer_bytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (outer == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  reservation.outer = reinterpret_cast<uint64_t>(outer);
  const uint64_t begin = reservation.outer + kPage;
  *address = begin + pages - RoundUp(bytes, kAllocationAlignment);
  reservation.bytes = bytes;
  MapInaccessible(begin, pages, memory->fd.get());
  std::lock_guard<std::mutex> lock(mu_);
  reservations_[*address] = reservation;
  Mapping& mapping = mappings_[*address];
  mapping.bytes = bytes;
  mapping.pages = begin;
  mapping.page_bytes = pages;
  mapping.access[memory->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  mapping.memory = std::move(memory);
  return CUDA_SUCCESS;
}

CUresult MemoryMap::Release(uint64_t address) {
  std::shared_ptr<Physical> released;  // outlives the lock
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || !it->second.allocation) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = mappings_.find(address);
  DieIfOpen(mapping, "cuMemFree");
  released = std::move(mapping->second.memory);
  Retire(it->second);
  mappings_.erase(mapping);
  reservations_.erase(it);
  return CUDA_SUCCESS;
}

}  // namespace zeroshard::fake_cuda
