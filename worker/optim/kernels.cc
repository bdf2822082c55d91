#include "worker/optim/kernels.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "worker/optim/kernel_tables.h"
#include "worker/optim/random_key.h"

namespace zeroshard {
namespace {

using optim_internal::CoreArrays;
using optim_internal::CoreFn;
using optim_internal::CoreMaster;
using optim_internal::CoreTable;
using optim_internal::StageTable;

// One segment of a pass, or a part of one.
struct Run {
  const UpdatePass& pass;
  const UpdateSegment& segment;
  const StageTable& stages;
  CoreFn core;
};

// The fp32 values of a block on their way through the core.
struct Buffers {
  alignas(64) float grad[kStateBlock];
  alignas(64) float param[kStateBlock];
  alignas(64) float state[kMaxStateSlots][kStateBlock];
};

Isa FastestIsa() {
  static const Isa isa = BestIsa();
  return isa;
}

template <class T>
T* At(T* element0, uint64_t at) {
  return element0 == nullptr ? nullptr : element0 + at;
}

CoreMaster CoreMasterOf(const UpdatePass& pass) {
  const UpdateArrays& a = pass.arrays;
  if (a.master == MasterKind::kSplit) return optim_internal::kCoreSplit;
  const bool fused =
      a.master == MasterKind::kFloat32 && a.out != nullptr && a.out_dtype == DType::kBfloat16;
  if (!fused) return optim_internal::kCoreFloat32;
  return pass.stream_output ? optim_internal::kCoreFloat32ToBf16Streamed
                            : optim_internal::kCoreFloat32ToBf16;
}

// Whether something must be widened or narrowed around the core.
bool NeedsStages(const UpdateArrays& a, int states) {
  const bool other_output = a.out != nullptr && a.out_dtype != DType::kBfloat16;
  const bool fp32_states = states == 0 || a.state_format == StateFormat::kFloat32;
  const bool own_master =
      a.master == MasterKind::kSplit || (a.master == MasterKind::kFloat32 && !other_output);
  return !fp32_states || !own_master || a.grad_dtype == DType::kFloat16;
}

CoreArrays ArraysAt(const UpdateArrays& a, uint64_t at) {
  CoreArrays core = {};
  core.grad = a.grad_dtype == DType::kFloat32
                  ? static_cast<const void*>(static_cast<const float*>(a.grad) + at)
                  : static_cast<const uint16_t*>(a.grad) + at;
  core.param = At(a.param, at);
  core.high = At(a.high, at);
  core.low = At(a.low, at);
  if (a.state_format == StateFormat::kFloat32) {
    for (int slot = 0; slot < kMaxStateSlots; ++slot) {
      core.state[slot] = At(static_cast<float*>(a.state[slot]), at);
    }
  }
  if (a.out_dtype == DType::kBfloat16) core.out = At(static_cast<uint16_t*>(a.out), at);
  return core;
}

// Widens the states of [at, at + n), which is one block if they have 8 bits.
void LoadStates(const Run& run, const OptimizerInfo& info, uint64_t at, uint64_t n,
                Buffers& buffers) {
  const UpdateArrays& a = run.pass.arrays;
  for (int slot = 0; slot < info.state_slots; ++slot) {
    float* values = buffers.state[slot];
    if (a.state_format == StateFormat::kBfloat16) {
      run.stages.load_bf16(static_cast<const uint16_t*>(a.state[slot]) + at, n, values);
      continue;
    }
    const float scale = a.absmax[slot][at / kStateBlock + run.segment.block_shift];
    const auto* codes = static_cast<const uint8_t*>(a.state[slot]) + at;
    const bool has_sign = info.slots[slot].map == StateMap::kSigned;
    (has_sign ? run.stages.decode_signed : run.stages.decode_unsigned)(codes, n, scale, values);
  }
}

void StoreStates(const Run& run, const OptimizerInfo& info, uint64_t at, uint64_t n,
                 const Buffers& buffers) {
  const UpdateArrays& a = run.pass.arrays;
  for (int slot = 0; slot < info.state_slots; ++slot) {
    const float* values = buffers.state[slot];
    if (a.state_format == StateFormat::kBfloat16) {
      run.stages.store_bf16(values, n, static_cast<uint16_t*>(a.state[slot]) + at);
      continue;
    }
    auto* codes = static_cast<uint8_t*>(a.state[slot]) + at;
    const bool has_sign = info.slots[slot].map == StateMap::kSigned;
    a.absmax[slot][at / kStateBlock + run.segment.block_shift] =
        (has_sign ? run.stages.encode_signed : run.stages.encode_unsigned)(values, n, codes);
  }
}

// What the core has not stored itself: the master in its form, or the output.
void StoreMaster(const Run& run, const CoreArrays& core, uint64_t at, uint64_t n) {
  const UpdateArrays& a = run.pass.arrays;
  if (a.master == MasterKind::kStochastic) {
    const uint64_t key = GrainKey(run.pass.random_key, at / kStateBlock);
    run.stages.store_stochastic(core.param, n, key, at % kStateBlock, a.high + at);
    if (a.out == nullptr) return;
    std::memcpy(static_cast<uint16_t*>(a.out) + at, a.high + at, n * sizeof(uint16_t));
  } else if (a.master == MasterKind::kFloat32Canonical) {
    if (a.out == nullptr) {
      run.stages.canonical(core.param, n);
    } else {
      run.stages.canonical_bf16(core.param, n, core.out);
    }
  } else if (a.master == MasterKind::kFloat32 && a.out != nullptr) {
    if (a.out_dtype == DType::kFloat32) {
      run.stages.store_fp32(core.param, n, static_cast<float*>(a.out) + at);
    } else if (a.out_dtype == DType::kFloat16) {
      run.stages.store_fp16(core.param, n, static_cast<uint16_t*>(a.out) + at);
    }
  }
}

// Elements of one grain.
void UpdateBlock(const Run& run, uint64_t at, uint64_t n, Buffers& buffers) {
  const UpdateArrays& a = run.pass.arrays;
  const OptimizerInfo& info = GetOptimizerInfo(run.pass.kind);
  CoreArrays core = ArraysAt(a, at);
  if (a.grad_dtype == DType::kFloat16) {
    run.stages.load_fp16(static_cast<const uint16_t*>(a.grad) + at, n, buffers.grad);
    core.grad = buffers.grad;
  }
  if (a.master == MasterKind::kStochastic) {
    run.stages.load_bf16(core.high, n, buffers.param);
    core.param = buffers.param;
  }
  const bool staged = a.state_format != StateFormat::kFloat32;
  if (staged) {
    LoadStates(run, info, at, n, buffers);
    for (int slot = 0; slot < info.state_slots; ++slot) core.state[slot] = buffers.state[slot];
  }
  run.core(core, 0, n, run.pass.grad_scale, run.pass.args[run.segment.args]);
  if (staged) StoreStates(run, info, at, n, buffers);
  StoreMaster(run, core, at, n);
}

void UpdateBlocks(const Run& run, uint64_t begin, uint64_t end) {
  if (run.pass.arrays.state_format == StateFormat::kInt8) {
    const auto whole = [&](uint64_t cut) {
      return cut % kStateBlock == 0 || cut == run.segment.begin || cut == run.segment.end;
    };
    ZS_CHECK(whole(begin) && whole(end), "a pass cuts a block of 8-bit states");
  }
  Buffers buffers;
  for (uint64_t at = begin; at < end;) {
    const uint64_t next = std::min(end, (at / kStateBlock + 1) * kStateBlock);
    UpdateBlock(run, at, next - at, buffers);
    at = next;
  }
}

}  // namespace

PreparedUpdate::PreparedUpdate(Isa isa, const UpdatePass& pass)
    : pass_(pass), isa_(isa), arrays_(ArraysAt(pass.arrays, 0)) {
  const int grad = pass.arrays.grad_dtype == DType::kBfloat16 ? 1 : 0;
  core_ = optim_internal::CoresOf(isa).core[static_cast<int>(pass.kind)][grad][CoreMasterOf(pass)];
  staged_ = NeedsStages(pass.arrays, GetOptimizerInfo(pass.kind).state_slots);
}

PreparedUpdate::PreparedUpdate(const UpdatePass& pass) : PreparedUpdate(FastestIsa(), pass) {}

void PreparedUpdate::Apply(uint64_t begin, uint64_t end) const {
  const absl::Span<const UpdateSegment> segments = pass_.segments;
  auto segment =
      segments.size() == 1
          ? segments.begin()
          : std::upper_bound(segments.begin(), segments.end(), begin,
                             [](uint64_t at, const UpdateSegment& s) { return at < s.end; });
  // Small parameters that touch and have the same arguments are updated together.
  const bool joins = pass_.arrays.state_format != StateFormat::kInt8;
  while (segment != segments.end() && segment->begin < end) {
    const UpdateSegment& first = *segment;
    uint64_t stop = first.end;
    for (++segment; joins && segment != segments.end() && stop < end; ++segment) {
      if (segment->begin != stop || segment->args != first.args) break;
      stop = segment->end;
    }
    const uint64_t from = std::max(begin, first.begin);
    const uint64_t to = std::min(end, stop);
    if (from < to) ApplyTo(first, from, to);
  }
}

void PreparedUpdate::ApplyTo(const UpdateSegment& segment, uint64_t begin, uint64_t end) const {
  if (staged_) {
    UpdateBlocks({pass_, segment, optim_internal::StagesOf(isa_), core_}, begin, end);
  } else {
    core_(arrays_, begin, end, pass_.grad_scale, pass_.args[segment.args]);
  }
}

void ApplyUpdateOn(Isa isa, const UpdatePass& pass, uint64_t begin, uint64_t end) {
  PreparedUpdate(isa, pass).Apply(begin, end);
}

void ApplyUpdate(const UpdatePass& pass, uint64_t begin, uint64_t end) {
  PreparedUpdate(pass).Apply(begin, end);
}

}  // namespace zeroshard
