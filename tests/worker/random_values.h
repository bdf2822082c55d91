// Random tensors for tests of the numeric kernels.
#ifndef ZEROSHARD_TESTS_WORKER_RANDOM_VALUES_H_
#define ZEROSHARD_TESTS_WORKER_RANDOM_VALUES_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/dtype.h"

namespace zeroshard {

// kOrdinary: normally distributed. kAny: one value in four is a zero of either sign, a denormal, a
// huge value, an infinity or a NaN of any payload.
enum class Values { kOrdinary, kAny };

inline float RandomValue(std::mt19937_64& random, Values values, float scale = 1.0f) {
  if (values == Values::kAny && random() % 4 == 0) {
    const auto bits = static_cast<uint32_t>(random());
    switch (random() % 6) {
      case 0:
        return std::bit_cast<float>(bits & 0x80000000u);
      case 1:
        return std::bit_cast<float>(bits & 0x807fffffu);
      case 2:
        return std::bit_cast<float>((bits & 0x80ffffffu) | 0x7e000000u);
      case 3:
        return std::bit_cast<float>((bits & 0x80000000u) | 0x7f800000u);
      case 4:
        return std::bit_cast<float>(bits | 0x7f800001u);
      default:
        return std::bit_cast<float>(bits);
    }
  }
  return std::normal_distribution<float>(0.0f, scale)(random);
}

inline std::vector<float> RandomFloats(std::mt19937_64& random, size_t count, Values values,
                                       float scale = 1.0f) {
  std::vector<float> result(count);
  for (float& value : result) value = RandomValue(random, values, scale);
  return result;
}

// `values` as elements of `dtype`.
inline std::vector<std::byte> Encode(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * SizeOf(dtype));
  ConvertFromFloat(dtype, values.data(), bytes.data(), values.size());
  return bytes;
}

inline std::vector<float> Decode(DType dtype, const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / SizeOf(dtype));
  ConvertToFloat(dtype, bytes.data(), values.data(), values.size());
  return values;
}

// All NaNs are the kernels' one NaN.
inline uint32_t CanonicalBits(float value) {
  return value != value ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
}

inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_RANDOM_VALUES_H_
