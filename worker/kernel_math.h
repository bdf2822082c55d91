// Element types and conversions for the numeric kernels.
//
// Everything here is always inlined: a kernel file is compiled once per instruction set, and a
// function emitted out of line would be merged by the linker across them. For the same reason
// kernel files call nothing from the standard library. All conversions are branch-free integer or
// exact fp32 arithmetic, so that they vectorise and do not depend on the hardware's conversion
// instructions.
#ifndef ZEROSHARD_WORKER_KERNEL_MATH_H_
#define ZEROSHARD_WORKER_KERNEL_MATH_H_

#include <cstdint>

#if defined(__CUDACC__)
#define ZS_KERNEL_FN __host__ __device__ __forceinline__
#else
#define ZS_KERNEL_FN inline __attribute__((always_inline))
#endif

namespace zeroshard::kernel {

ZS_KERNEL_FN uint32_t BitsOf(float value) { return __builtin_bit_cast(uint32_t, value); }
ZS_KERNEL_FN float FloatOf(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Which NaN an addition of two NaNs gives depends on the operand order the compiler chose: store
// one NaN only.
ZS_KERNEL_FN float CanonicalNan(float value) {
  return value != value ? FloatOf(0x7fc00000u) : value;
}

struct Fp32 {
  using Storage = float;
  static ZS_KERNEL_FN float Load(float value) { return value; }
  static ZS_KERNEL_FN float Store(float value) { return CanonicalNan(value); }
};

struct Bf16 {
  using Storage = uint16_t;
  static ZS_KERNEL_FN float Load(uint16_t bits) {
    return FloatOf(static_cast<uint32_t>(bits) << 16);
  }
  // Round to nearest even.
  static ZS_KERNEL_FN uint16_t Store(float value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
  }
  // The same of a value that CanonicalNan gave.
  static ZS_KERNEL_FN uint16_t StoreCanonical(float value) {
    const uint32_t bits = BitsOf(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Fp16 {
  using Storage = uint16_t;
  static ZS_KERNEL_FN float Load(uint16_t bits) {
    const uint32_t sign = (static_cast<uint32_t>(bits) & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + 0x38000000u;   // exponent bias 15 -> 127
    const uint32_t special = (magnitude << 13) | 0x7f800000u;  // inf, NaN
    const float subnormal =
        static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;  // exact
    const uint32_t finite = magnitude < 0x400u ? BitsOf(subnormal) : normal;
    return FloatOf(sign | (magnitude >= 0x7c00u ? special : finite));
  }
  // Round to nearest even; overflow becomes infinity from 65520 on.
  static ZS_KERNEL_FN uint16_t Store(float value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // 0.5 has the ulp of the smallest fp16 number, so this addition rounds at the right bit.
    const uint32_t subnormal =
        BitsOf(FloatOf(magnitude < 0x38800000u ? magnitude : 0u) + 0.5f) - 0x3f000000u;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : (result | sign);
    return static_cast<uint16_t>(result);
  }
};

}  // namespace zeroshard::kernel

#endif  // ZEROSHARD_WORKER_KERNEL_MATH_H_
