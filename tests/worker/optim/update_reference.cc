#include "tests/worker/optim/update_reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "worker/optim/random_key.h"

namespace zeroshard {
namespace {

float Float(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }
float Canonical(float value) { return Float(CanonicalBits(value)); }

struct Element {
  float p = 0;
  float s[kMaxStateSlots] = {};
};

void Adam(const UpdateArgs& a, float g, Element& e) {
  e.s[0] = e.s[0] * a.beta1 + g * a.one_minus_beta1;
  e.s[1] = e.s[1] * a.beta2 + a.one_minus_beta2 * g * g;
  e.p -= a.step_size * e.s[0] / (std::sqrt(e.s[1]) + a.scaled_eps);
}

void Momentum(const UpdateArgs& a, float g, Element& e) {
  if (a.first_step != 0) {
    e.s[0] = g;
  } else {
    e.s[0] = e.s[0] * a.momentum + g * a.one_minus_dampening;
  }
  e.p -= a.lr * (a.nesterov != 0 ? g + a.momentum * e.s[0] : e.s[0]);
}

void Lion(const UpdateArgs& a, float g, Element& e) {
  const float direction = e.s[0] * a.beta1 + g * a.one_minus_beta1;
  float sign = direction;  // 0 of either sign, NaN
  if (direction > 0) sign = 1;
  if (direction < 0) sign = -1;
  e.p -= a.lr * sign;
  e.s[0] = e.s[0] * a.beta2 + g * a.one_minus_beta2;
}

void Formula(OptimizerKind kind, const UpdateArgs& a, float g, Element& e) {
  if (kind == OptimizerKind::kAdamW || kind == OptimizerKind::kLion) {
    e.p *= a.decay_factor;
  } else if (a.weight_decay != 0) {
    g += a.weight_decay * e.p;
  }
  switch (kind) {
    case OptimizerKind::kAdamW:
    case OptimizerKind::kAdam:
      return Adam(a, g, e);
    case OptimizerKind::kSgd:
      e.p -= a.lr * g;
      return;
    case OptimizerKind::kSgdMomentum:
      return Momentum(a, g, e);
    case OptimizerKind::kAdagrad:
      e.s[0] += g * g;
      e.p -= a.lr * g / (std::sqrt(e.s[0]) + a.eps);
      return;
    case OptimizerKind::kLion:
      return Lion(a, g, e);
  }
}

// Of the two numbers with these low bits around `high`, the one that rounds to it.
float Join(uint16_t high, uint16_t low) {
  const uint32_t above = static_cast<uint32_t>(high) << 16 | low;
  if (FloatToBf16(Float(above)) == high || low == 0) return Float(above);  // 0: any NaN, too
  return Float(above - 0x10000u);
}

// A tie is moved to the side to which it rounds.
float Nudged(float value) {
  if (value != value) return Float(0x7fc00000u);
  const uint32_t bits = Bits(value);
  if ((bits & 0xffffu) != 0x8000u) return value;
  return Float(FloatToBf16(value) == bits >> 16 ? bits - 1 : bits + 1);
}

uint16_t RoundStochastically(float value, uint32_t random) {
  if (value != value) return 0x7fc0;
  const uint32_t rest = Bits(value) & 0xffffu;
  return static_cast<uint16_t>((Bits(value) >> 16) + (rest + random >= 0x10000u ? 1 : 0));
}

float LoadMaster(const UpdateTensors& t, uint64_t i) {
  switch (t.form.master) {
    case MasterKind::kSplit:
      return Join(t.high[i], t.low[i]);
    case MasterKind::kStochastic:
      return Bf16ToFloat(t.high[i]);
    default:
      return t.param[i];
  }
}

void StoreMaster(const UpdatePass& pass, UpdateTensors& t, uint64_t i, float p) {
  if (t.form.master == MasterKind::kSplit) {
    t.high[i] = FloatToBf16(Nudged(p));
    t.low[i] = static_cast<uint16_t>(Bits(Nudged(p)));
    return;
  }
  if (t.form.master == MasterKind::kStochastic) {
    const uint64_t key = GrainKey(pass.random_key, i / 256);
    t.high[i] = RoundStochastically(p, RandomBits(key, i % 256));
    if (!t.out.empty()) std::memcpy(t.out.data() + 2 * i, &t.high[i], 2);
    return;
  }
  p = t.form.master == MasterKind::kFloat32Canonical ? Nudged(p) : Canonical(p);
  t.param[i] = p;
  if (!t.out.empty()) {
    ConvertFromFloat(t.form.out_dtype, &p, t.out.data() + i * SizeOf(t.form.out_dtype), 1);
  }
}

size_t StateBytes(StateFormat format) { return 4u >> static_cast<int>(format); }

// The slot of every element's scale, counted by walking over the blocks.
std::vector<size_t> CountBlocks(const std::vector<uint64_t>& offsets) {
  std::vector<size_t> blocks = {0};
  for (uint64_t at = 1; at < offsets.back(); ++at) {
    const bool new_block = at % 256 == 0 || std::ranges::find(offsets, at) != offsets.end();
    blocks.push_back(blocks.back() + (new_block ? 1 : 0));
  }
  return blocks;
}

float LoadState(const UpdateTensors& t, StateMap map, int slot, uint64_t i) {
  const std::byte* states = t.state[slot].data();
  float value = 0;
  if (t.form.state_format == StateFormat::kFloat32) {
    std::memcpy(&value, states + 4 * i, 4);
  } else if (t.form.state_format == StateFormat::kBfloat16) {
    uint16_t bits;
    std::memcpy(&bits, states + 2 * i, 2);
    value = Bf16ToFloat(bits);
  } else {
    const float scale = t.absmax[slot][t.block_of[i]];
    if (scale == 0) return 0;
    value = PublishedBook(map)[static_cast<uint8_t>(states[i])] * scale;
    if (value == 0) value = 0;  // +0
  }
  return value;
}

void StoreState(UpdateTensors& t, int slot, uint64_t i, float value) {
  std::byte* states = t.state[slot].data();
  value = Canonical(value);
  if (t.form.state_format == StateFormat::kFloat32) {
    std::memcpy(states + 4 * i, &value, 4);
  } else {
    const uint16_t bits = FloatToBf16(value);
    std::memcpy(states + 2 * i, &bits, 2);
  }
}

// Stores the 8-bit states of one block.
void StoreBlock(UpdateTensors& t, StateMap map, int slot, uint64_t begin,
                const std::vector<float>& values) {
  float scale = 0;
  for (float value : values) {
    if (std::isfinite(value)) scale = std::max(scale, std::fabs(value));
  }
  t.absmax[slot][t.block_of[begin]] = scale;
  for (size_t i = 0; i < values.size(); ++i) {
    t.state[slot][begin + i] = std::byte{ReferenceCode(map, values[i], scale)};
  }
}

// One parameter's elements of one grain.
void UpdateBlock(const UpdatePass& pass, const UpdateArgs& args, UpdateTensors& t, uint64_t begin,
                 uint64_t end) {
  const OptimizerInfo& info = GetOptimizerInfo(pass.kind);
  const std::vector<float> grads = Decode(t.form.grad_dtype, t.grad);
  std::vector<float> states[kMaxStateSlots];
  for (uint64_t i = begin; i < end; ++i) {
    Element e = {.p = LoadMaster(t, i)};
    for (int slot = 0; slot < info.state_slots; ++slot) {
      e.s[slot] = LoadState(t, info.slots[slot].map, slot, i);
    }
    Formula(pass.kind, args, grads[i] * pass.grad_scale, e);
    StoreMaster(pass, t, i, e.p);
    for (int slot = 0; slot < info.state_slots; ++slot) {
      states[slot].push_back(e.s[slot]);
      if (t.form.state_format != StateFormat::kInt8) StoreState(t, slot, i, e.s[slot]);
    }
  }
  for (int slot = 0; slot < info.state_slots && t.form.state_format == StateFormat::kInt8; ++slot) {
    StoreBlock(t, info.slots[slot].map, slot, begin, states[slot]);
  }
}

}  // namespace

std::array<float, 256> PublishedBook(StateMap map) {
  std::vector<double> numbers = {0.0, 1.0};
  for (int i = 0; i < 7; ++i) {
    const int parts = (map == StateMap::kSigned ? 1 : 2) << i;
    for (int part = 0; part < parts; ++part) {
      const double low = 0.1 + 0.9 * part / parts;
      const double high = 0.1 + 0.9 * (part + 1) / parts;
      const double number = (low + high) / 2 * std::pow(10.0, i - 6);
      numbers.push_back(number);
      if (map == StateMap::kSigned) numbers.push_back(-number);
    }
  }
  std::ranges::sort(numbers);
  std::array<float, 256> book = {};
  std::ranges::transform(numbers, book.begin(), [](double x) { return static_cast<float>(x); });
  return book;
}

uint8_t ReferenceCode(StateMap map, float value, float scale) {
  static const std::array<float, 256> books[] = {PublishedBook(StateMap::kSigned),
                                                 PublishedBook(StateMap::kUnsigned)};
  const auto& book = books[map == StateMap::kSigned ? 0 : 1];
  if (value != value) value = 0;
  if (map == StateMap::kUnsigned && value < 0) value = 0;
  float share = value / (scale == 0 ? 1.0f : scale);
  share = std::clamp(share, -1.0f, 1.0f);
  int best = -1;
  double best_distance = INFINITY;
  for (int code = 0; code < 256; ++code) {
    const double distance = std::fabs(double{book[code]} - double{share});
    const bool nearer_to_zero =
        best >= 0 && distance == best_distance && std::fabs(book[code]) < std::fabs(book[best]);
    if (distance < best_distance || nearer_to_zero) {
      best = code;
      best_distance = distance;
    }
  }
  if (map == StateMap::kUnsigned && value > 0) best = std::max(best, 1);
  return static_cast<uint8_t>(best);
}

UpdateArrays UpdateTensors::Arrays() {
  UpdateArrays arrays = form;
  arrays.grad = grad.data();
  arrays.param = param.empty() ? nullptr : param.data();
  arrays.high = high.empty() ? nullptr : high.data();
  arrays.low = low.empty() ? nullptr : low.data();
  arrays.out = out.empty() ? nullptr : out.data();
  for (int slot = 0; slot < kMaxStateSlots; ++slot) {
    arrays.state[slot] = state[slot].empty() ? nullptr : state[slot].data();
    arrays.absmax[slot] = absmax[slot].empty() ? nullptr : absmax[slot].data();
  }
  return arrays;
}

std::vector<UpdateSegment> UpdateTensors::Segments(const std::vector<int>& updated) const {
  std::vector<UpdateSegment> segments;
  uint32_t shift = 0;
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    if (offsets[i] == offsets[i + 1]) continue;
    if (offsets[i] % 256 != 0) ++shift;
    if (updated[i] < 0) continue;
    segments.push_back({.begin = offsets[i],
                        .end = offsets[i + 1],
                        .args = static_cast<uint32_t>(updated[i]),
                        .block_shift = shift});
  }
  return segments;
}

bool UpdateTensors::operator==(const UpdateTensors& other) const {
  const auto same = [](const auto& a, const auto& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
  };
  bool equal = same(param, other.param) && same(high, other.high) && same(low, other.low) &&
               same(out, other.out) && same(grad, other.grad);
  for (int slot = 0; slot < kMaxStateSlots; ++slot) {
    equal = equal && same(state[slot], other.state[slot]) && same(absmax[slot], other.absmax[slot]);
  }
  return equal;
}

UpdateTensors RandomTensors(std::mt19937_64& random, const UpdateArrays& form, OptimizerKind kind,
                            const std::vector<uint64_t>& offsets, Values values) {
  UpdateTensors t;
  t.form = form;
  t.offsets = offsets;
  t.block_of = CountBlocks(offsets);
  const size_t n = t.elements();
  t.grad = Encode(form.grad_dtype, RandomFloats(random, n, values));
  const std::vector<float> p = RandomFloats(random, n, values);
  for (size_t i = 0; i < n; ++i) {
    if (form.master == MasterKind::kSplit) {
      t.high.push_back(FloatToBf16(Nudged(p[i])));
      t.low.push_back(static_cast<uint16_t>(Bits(Nudged(p[i]))));
    } else if (form.master == MasterKind::kStochastic) {
      t.high.push_back(static_cast<uint16_t>(Bits(p[i]) >> 16));
    } else {
      t.param.push_back(form.master == MasterKind::kFloat32 ? p[i] : Nudged(p[i]));
    }
  }
  // `out` of the form is any address when there is an output.
  if (form.out != nullptr) t.out.assign(n * SizeOf(form.out_dtype), std::byte{0x5a});
  const OptimizerInfo& info = GetOptimizerInfo(kind);
  for (int slot = 0; slot < info.state_slots; ++slot) {
    t.state[slot].assign(n * StateBytes(form.state_format), std::byte{0});
    std::vector<float> s = RandomFloats(random, n, values, 0.1f);
    if (slot == 1 || kind == OptimizerKind::kAdagrad) {
      for (float& v : s) v = values == Values::kOrdinary ? v * v : v;
    }
    if (form.state_format != StateFormat::kInt8) {
      for (size_t i = 0; i < n; ++i) StoreState(t, slot, i, s[i]);
      continue;
    }
    for (std::byte& code : t.state[slot]) code = std::byte{static_cast<uint8_t>(random())};
    for (size_t block = 0; block <= t.block_of.back(); ++block) {
      t.absmax[slot].push_back(random() % 8 == 0 ? 0.0f : std::fabs(s[block]));
      if (!std::isfinite(t.absmax[slot].back())) t.absmax[slot].back() = 1e30f;
    }
  }
  return t;
}

std::vector<UpdateArgs> RandomArgs(std::mt19937_64& random, OptimizerKind kind, size_t count) {
  std::vector<UpdateArgs> args;
  for (size_t i = 0; i < count; ++i) {
    Hyperparameters h = {.lr = 1e-3 * static_cast<double>(1 + random() % 9)};
    h.weight_decay = random() % 2 == 0 ? 0.0 : 0.1;
    h.momentum = kind == OptimizerKind::kSgd || random() % 3 == 0 ? 0.0 : 0.9;
    h.nesterov = h.momentum > 0 && random() % 2 == 0;
    h.dampening = h.nesterov ? 0.0 : 0.25;
    args.push_back(MakeUpdateArgs(h, 1 + static_cast<int64_t>(random() % 4)));
  }
  return args;
}

void ReferenceUpdate(const UpdatePass& pass, UpdateTensors& t) {
  for (const UpdateSegment& segment : pass.segments) {
    for (uint64_t at = segment.begin; at < segment.end;) {
      const uint64_t end = std::min(segment.end, (at / 256 + 1) * 256);
      UpdateBlock(pass, pass.args[segment.args], t, at, end);
      at = end;
    }
  }
}

}  // namespace zeroshard
