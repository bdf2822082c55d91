// Fixed-width little-endian numbers in byte strings: what files are made of. Pure.
#ifndef ZEROSHARD_STORAGE_BYTES_H_
#define ZEROSHARD_STORAGE_BYTES_H_

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace zeroshard {

static_assert(std::endian::native == std::endian::little,
              "formats are little-endian and written without conversion");

template <std::unsigned_integral T>
void AppendInteger(std::string& bytes, T value) {
  char buffer[sizeof(T)];
  std::memcpy(buffer, &value, sizeof(T));
  bytes.append(buffer, sizeof(T));
}

// The number at `offset`, which must lie within `bytes`.
template <std::unsigned_integral T>
T IntegerAt(std::string_view bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

constexpr uint64_t RoundUpTo(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_BYTES_H_
