#include "tests/fakes/cuda/image.h"

#include <cstdint>
#include <cstring>

namespace zeroshard::fake_cuda {
namespace {

constexpr uint32_t kFatbinMagic = 0xba55ed50;
constexpr uint32_t kWrapperMagic = 0x466243b1;

struct FatbinHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;  // of all entries
};

struct Wrapper {
  uint32_t magic;
  uint32_t version;
  const void* fatbin;
};

// The beginning of an entry, as far as it matters here.
struct Entry {
  uint16_t kind;  // 1: PTX, 2: ELF
  uint16_t flags;
  uint32_t header_bytes;
  uint64_t payload_bytes;
  uint32_t unused[3];
  uint32_t arch;  // 90 for sm_90
};
static_assert(sizeof(Entry) == 32);

bool Runs(const Entry& entry, int capability) {
  const int arch = static_cast<int>(entry.arch);
  if (entry.kind == 1) return capability >= arch;
  return entry.kind == 2 && capability / 10 == arch / 10 && capability >= arch;
}

CUresult CheckFatbin(const char* image, int capability) {
  FatbinHeader header;
  std::memcpy(&header, image, sizeof(header));
  if (header.version != 1 || header.header_bytes < sizeof(header)) return CUDA_ERROR_INVALID_IMAGE;
  const char* at = image + header.header_bytes;
  const char* const end = at + header.bytes;
  while (at + sizeof(Entry) <= end) {
    Entry entry;
    std::memcpy(&entry, at, sizeof(entry));
    if (entry.header_bytes < sizeof(entry)) return CUDA_ERROR_INVALID_IMAGE;
    if (Runs(entry, capability)) return CUDA_SUCCESS;
    at += entry.header_bytes + entry.payload_bytes;
  }
  return CUDA_ERROR_NO_BINARY_FOR_GPU;
}

}  // namespace

CUresult CheckImage(const void* image, int major, int minor) {
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  uint32_t magic;
  std::memcpy(&magic, image, sizeof(magic));
  if (magic == kWrapperMagic) {
    Wrapper wrapper;
    std::memcpy(&wrapper, image, sizeof(wrapper));
    image = wrapper.fatbin;
    std::memcpy(&magic, image, sizeof(magic));
  }
  const auto* const bytes = static_cast<const char*>(image);
  if (magic == kFatbinMagic) return CheckFatbin(bytes, major * 10 + minor);
  if (std::memcmp(bytes, "\177ELF", 4) == 0) return CUDA_SUCCESS;
  return std::strstr(bytes, ".version") != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

}  // namespace zeroshard::fake_cuda
