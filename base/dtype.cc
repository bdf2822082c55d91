#include "base/dtype.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/strings.h"

namespace zeroshard {

absl::StatusOr<DType> ParseDType(std::string_view name) {
  std::string_view bare = name;
  if (bare.starts_with("torch.")) bare.remove_prefix(6);
  if (bare == "float32" || bare == "fp32" || bare == "float") return DType::kFloat32;
  if (bare == "bfloat16" || bare == "bf16") return DType::kBfloat16;
  if (bare == "float16" || bare == "fp16" || bare == "half") return DType::kFloat16;
  return absl::InvalidArgumentError(absl::StrCat("unknown element type \"", Abs(name),
                                                 "\": expected float32, bfloat16 or float16"));
}

void ConvertToFloat(DType from, const void* source, float* target, size_t count) {
  const auto* halves = static_cast<const uint16_t*>(source);
  switch (from) {
    case DType::kFloat32:
      if (count > 0) std::memcpy(target, source, count * sizeof(float));
      return;
    case DType::kBfloat16:
      for (size_t i = 0; i < count; ++i) target[i] = Bf16ToFloat(halves[i]);
      return;
    case DType::kFloat16:
      for (size_t i = 0; i < count; ++i) target[i] = Fp16ToFloat(halves[i]);
      return;
  }
}

void ConvertFromFloat(DType to, const float* source, void* target, size_t count) {
  auto* halves = static_cast<uint16_t*>(target);
  switch (to) {
    case DType::kFloat32:
      if (count > 0) std::memcpy(target, source, count * sizeof(float));
      return;
    case DType::kBfloat16:
      for (size_t i = 0; i < count; ++i) halves[i] = FloatToBf16(source[i]);
      return;
    case DType::kFloat16:
      for (size_t i = 0; i < count; ++i) halves[i] = FloatToFp16(source[i]);
      return;
  }
}

}  // namespace zeroshard
