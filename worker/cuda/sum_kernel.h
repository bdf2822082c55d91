// Sums of gradients in the canonical order, squared norms, presence bits, conversions.
//
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_CUDA_SUM_KERNEL_H_
#define ZEROSHARD_WORKER_CUDA_SUM_KERNEL_H_

#include <cstdint>

#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/kernel_params.h"

namespace zeroshard::gpu {

// A unit's parameter at some element: DeviceParameter of worker/cuda/kernel_args.h.
struct Place {
  uint64_t begin;
  uint64_t end;
};

// The position of the last parameter that begins at or before `element` of the unit.
ZS_KERNEL_FN uint32_t FindPosition(uint64_t parameters, uint64_t count, uint64_t element) {
  uint32_t below = 0;
  auto above = static_cast<uint32_t>(count);
  while (below < above) {
    const uint32_t middle = (below + above) / 2;
    const bool begun = At<const Place>(parameters, middle)->begin <= element;
    below = begun ? middle + 1 : below;
    above = begun ? above : middle;
  }
  return below == 0 ? 0 : below - 1;
}

ZS_KERNEL_FN bool HasBit(uint64_t words, uint32_t position) {
  return (*At<const uint64_t>(words, position / 64) >> (position % 64) & 1) != 0;
}

// Values of kParts vectors each, in registers: pushing moves all of them, so that none is addressed
// by a number that is known at run time only. A value may be absent, and then passes through.
template <uint32_t kDepth, uint32_t kParts>
struct SumStack {
  struct Value {
    Floats part[kParts];
  };

  Value value[kDepth];  // the top first
  uint32_t present;     // bit i: value[i]

  ZS_KERNEL_FN void Push(const Value& pushed, bool is_present) {
    ZS_UNROLL for (uint32_t i = kDepth - 1; i > 0; --i) value[i] = value[i - 1];
    value[0] = pushed;
    present = present << 1 | (is_present ? 1u : 0u);
  }

  ZS_KERNEL_FN void AddToTop(const Value& right, bool is_present) {
    value[0] = Combined(value[0], (present & 1u) != 0, right, is_present);
    present |= is_present ? 1u : 0u;
  }

  ZS_KERNEL_FN void AddTop() {
    value[0] = Combined(value[1], (present & 2u) != 0, value[0], (present & 1u) != 0);
    ZS_UNROLL for (uint32_t i = 1; i + 1 < kDepth; ++i) value[i] = value[i + 1];
    present = present >> 1 | (present & 1u);
  }

  static ZS_KERNEL_FN Value Combined(const Value& left, bool has_left, const Value& right,
                                     bool has_right) {
    Value result;
    ZS_UNROLL for (uint32_t part = 0; part < kParts; ++part) {
      ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
        const float a = left.part[part].at[i];
        const float b = right.part[part].at[i];
        const float one = has_left ? a : b;
        result.part[part].at[i] = has_left && has_right ? a + b : one;
      }
    }
    return result;
  }
};

// How inputs are read: all of one 16-bit type, 16 bytes an access, or each of its own type.
template <uint32_t kType>
struct HalfInputs {
  static constexpr uint32_t kParts = 2;

  static ZS_KERNEL_FN Words4 Load(uint32_t, uint64_t address, uint64_t element) {
    return *At<const Words4>(address, element / (2 * kVector));
  }
  static ZS_KERNEL_FN Floats Part(uint32_t, const Words4& raw, uint32_t part) {
    return Widen(kType, part == 0 ? Words4{raw.x, raw.y, 0, 0} : Words4{raw.z, raw.w, 0, 0});
  }
};

struct AnyInputs {
  static constexpr uint32_t kParts = 1;

  static ZS_KERNEL_FN Words4 Load(uint32_t type, uint64_t address, uint64_t element) {
    return LoadRaw(type, address, element);
  }
  static ZS_KERNEL_FN Floats Part(uint32_t type, const Words4& raw, uint32_t) {
    return Widen(type, raw);
  }
};

// What was read of an input. The payload is read whether it is present or not, and nothing is
// computed from it yet: all of it is under way at once.
struct RawInput {
  Words4 raw;
  uint64_t presence;
  float weight;
};

template <class Inputs>
ZS_KERNEL_FN RawInput ReadInput(const SumParams& params, uint32_t at, uint64_t element,
                                uint32_t position) {
  const uint32_t input = params.step[at].input;
  if (params.data[input] == 0) return {};
  const uint64_t presence = params.presence[input];
  const uint64_t weight = params.weight_address[input];
  return {Inputs::Load(params.step[at].type, params.data[input], element),
          presence != 0 ? *At<const uint64_t>(presence, position / 64) : ~uint64_t{0},
          weight != 0 ? *At<const float>(weight) : params.weight[input]};
}

// Leaves the sum at the top of the stack. Each input is asked for before the one ahead is added.
template <class Inputs, class Stack>
ZS_KERNEL_FN void RunProgram(const SumParams& params, uint64_t element, uint32_t position,
                             Stack& stack) {
  RawInput next = ReadInput<Inputs>(params, 0, element, position);
  for (uint32_t at = 0; at < params.steps; ++at) {
    const RawInput input = next;
    if (at + 1 < params.steps) next = ReadInput<Inputs>(params, at + 1, element, position);
    const SumStep step = params.step[at];
    typename Stack::Value value;
    ZS_UNROLL for (uint32_t part = 0; part < Inputs::kParts; ++part) {
      value.part[part] = Inputs::Part(step.type, input.raw, part);
      ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) value.part[part].at[i] *= input.weight;
    }
    const bool present = (input.presence >> (position % 64) & 1) != 0;
    if (step.pushed != 0) {
      stack.Push(value, present);
    } else {
      stack.AddToTop(value, present);
    }
    for (uint32_t adds = step.adds; adds > 0; --adds) stack.AddTop();
  }
}

// Into the accumulator; elements from `used` on are padding.
ZS_KERNEL_FN void StoreSum(const SumParams& params, uint64_t element, uint32_t used, bool adds,
                           Floats sum) {
  const uint32_t type = params.accumulator_type;
  if (adds) {
    const Floats old = Load(type, params.accumulator, element);
    ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) sum.at[i] = old.at[i] + sum.at[i];
  }
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) sum.at[i] = i < used ? sum.at[i] : 0.0f;
  Store(type, params.accumulator, element, sum);
}

template <uint32_t kDepth, class Inputs>
ZS_KERNEL_FN void SumElements(const SumParams& params, uint32_t thread) {
  constexpr uint32_t kElements = Inputs::kParts * kVector;
  const uint64_t threads = uint64_t{BlockCount()} * kBlockThreads;
  uint64_t group = uint64_t{BlockIndex()} * kBlockThreads + thread;
  for (; group < params.elements / kElements; group += threads) {
    const uint64_t element = group * kElements;
    const uint64_t unit_element = params.first + element;
    const uint32_t position = FindPosition(params.parameters, params.parameter_count, unit_element);
    const uint64_t end = At<const Place>(params.parameters, position)->end;
    const uint64_t left = end > unit_element ? end - unit_element : 0;
    SumStack<kDepth, Inputs::kParts> stack = {};
    RunProgram<Inputs>(params, element, position, stack);
    const bool present = (stack.present & 1u) != 0;
    if (!present && left > 0) continue;
    const bool adds = params.before != 0 && HasBit(params.before, position);
    const uint32_t used = left < kElements ? static_cast<uint32_t>(left) : kElements;
    ZS_UNROLL for (uint32_t part = 0; part < Inputs::kParts; ++part) {
      const uint32_t skipped = part * kVector;
      StoreSum(params, element + skipped, used > skipped ? used - skipped : 0, adds,
               stack.value[0].part[part]);
    }
  }
}

ZS_KERNEL_FN void MergeWord(const MergePresenceParams& params, uint32_t word) {
  if (word >= kPresenceWords) return;
  uint64_t bits = params.before == 0 ? 0 : *At<const uint64_t>(params.before, word);
  for (uint32_t i = 0; i < params.inputs; ++i) {
    if (params.input[i] != 0) bits |= *At<const uint64_t>(params.input[i], word);
  }
  *At<uint64_t>(params.after, word) = bits;
}

ZS_KERNEL_FN void ConvertElements(const ConvertParams& params, uint32_t thread) {
  const uint64_t threads = uint64_t{BlockCount()} * kBlockThreads;
  const uint64_t vectors = params.elements / kVector;
  uint64_t vector = uint64_t{BlockIndex()} * kBlockThreads + thread;
  for (; vector < vectors; vector += threads) {
    const Floats values = Load(params.from_type, params.from, vector * kVector);
    Store(params.to_type, params.to, vector * kVector, values);
  }
}

// What is left behind the last whole vector; at most three elements.
ZS_KERNEL_FN void ConvertTail(const ConvertParams& params, uint32_t thread) {
  const uint64_t at = params.elements / kVector * kVector + thread;
  if (BlockIndex() != 0 || at >= params.elements) return;
  float value;
  if (params.from_type == kTypeFloat32) {
    value = *At<const float>(params.from, at);
  } else {
    const uint16_t bits = *At<const uint16_t>(params.from, at);
    value = params.from_type == kTypeBfloat16 ? kernel::Bf16::Load(bits) : kernel::Fp16::Load(bits);
  }
  if (params.to_type == kTypeFloat32) {
    *At<float>(params.to, at) = kernel::CanonicalNan(value);
  } else {
    *At<uint16_t>(params.to, at) =
        params.to_type == kTypeBfloat16 ? kernel::Bf16::Store(value) : kernel::Fp16::Store(value);
  }
}

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_SUM_KERNEL_H_
