// The instruction-set levels that the numeric kernels are compiled for.
//
// Every kernel file is compiled once per level, from the same source, without fma contraction, so
// all levels give the same bits; the level changes speed only. The binary itself needs x86-64-v2.
// Kernel tables are looked up by level: the program uses BestIsa(), tests run every level up to it.
#ifndef ZEROSHARD_DEVICE_CPU_ISA_H_
#define ZEROSHARD_DEVICE_CPU_ISA_H_

#include <cstdint>
#include <string_view>
#include <vector>

namespace zeroshard {

enum class Isa : uint8_t { kX86V2 = 0, kX86V3 = 1, kX86V4 = 2 };

inline constexpr int kIsaCount = 3;

// "x86-64-v2" ...
std::string_view IsaName(Isa isa);

// The highest level that this processor and kernel support.
Isa BestIsa();

// All levels from kX86V2 to BestIsa().
std::vector<Isa> SupportedIsas();

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_ISA_H_
