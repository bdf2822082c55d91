// Element types of tensors, and exact conversions between them.
//
// Conversions round to nearest, ties to even, and are written without branches so that a loop over
// them vectorises. They assume the default rounding mode; flush-to-zero modes do not change them.

#ifndef ZEROSHARD_BASE_DTYPE_H_
#define ZEROSHARD_BASE_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace zeroshard {

// The values are written to disk and to shared memory: never renumber.
enum class DType : uint8_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Bytes of one element.
constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// "float32", "bfloat16", "float16".
constexpr std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "invalid";
}

// Accepts the names above, and fp32, bf16, fp16, float, half, with or without "torch.".
absl::StatusOr<DType> ParseDType(std::string_view name);

// Whether a byte from disk or wire is a DType.
constexpr bool IsValidDType(uint8_t value) { return value <= 2; }

constexpr float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// NaN of any payload becomes 0x7FC0, as PyTorch does.
constexpr uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

constexpr float Fp16ToFloat(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7FFFu;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  // A subnormal is its mantissa times 2^-24, exactly.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t special = (magnitude << 13) + 0x70000000u;
  uint32_t result = magnitude < 0x0400u ? subnormal : normal;
  result = magnitude >= 0x7C00u ? special : result;
  return std::bit_cast<float>(result | sign);
}

// Values of 65520 and above become infinity; NaN becomes a quiet NaN of the same sign.
constexpr uint16_t FloatToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rebased = magnitude - 0x38000000u;
  const uint32_t normal = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
  // One unit in the last place of 0.5 is 2^-24, the spacing of subnormals: the sum rounds there.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7C00u : result;
  result = magnitude > 0x7F800000u ? 0x7E00u : result;
  return static_cast<uint16_t>(result | sign);
}

// Converts `count` elements of type `from` at `source` into floats, and back. The ranges must not
// overlap. A float32 source or target is copied bit for bit.
void ConvertToFloat(DType from, const void* source, float* target, size_t count);
void ConvertFromFloat(DType to, const float* source, void* target, size_t count);

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_DTYPE_H_
