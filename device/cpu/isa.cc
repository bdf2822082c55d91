#include "device/cpu/isa.h"

namespace zeroshard {

std::string_view IsaName(Isa isa) {
  switch (isa) {
    case Isa::kX86V2:
      return "x86-64-v2";
    case Isa::kX86V3:
      return "x86-64-v3";
    case Isa::kX86V4:
      return "x86-64-v4";
  }
  return "unknown";
}

Isa BestIsa() {
  if (__builtin_cpu_supports("x86-64-v4")) return Isa::kX86V4;
  if (__builtin_cpu_supports("x86-64-v3")) return Isa::kX86V3;
  return Isa::kX86V2;
}

std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas;
  for (int level = 0; level <= static_cast<int>(BestIsa()); ++level) {
    isas.push_back(static_cast<Isa>(level));
  }
  return isas;
}

}  // namespace zeroshard
