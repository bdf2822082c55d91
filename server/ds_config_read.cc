#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "server/ds_config_settings.h"
#include "server/hjson.h"
#include "server/text.h"

// Step 3: every key of the tree against its row.

namespace zeroshard {
namespace {

using Kind = JsonValue::Kind;

bool ContainsAuto(const JsonValue& value) {
  if (value.is_string("auto")) return true;
  return std::any_of(value.items.begin(), value.items.end(), ContainsAuto);
}

class Reader {
 public:
  Reader(const Marks& marks, Findings& findings) : marks_(marks), findings_(findings) {}

  Settings Run(const JsonValue& root) {
    ReadBlock(root, "", UnknownKeys::kIgnore);
    ReadOptimizer(root.Find("optimizer"));
    ReadScheduler(root.Find("scheduler"));
    return std::move(settings_);
  }

 private:
  void ReadBlock(const JsonValue& block, const std::string& path, UnknownKeys unknown);
  void ReadUnknown(const JsonMember& member, const std::string& path, UnknownKeys unknown);
  void ReadKey(const KeySpec& spec, const JsonValue& value);
  void ReadInnerBlock(const KeySpec& spec, const JsonValue& value);
  void ReadScalar(const KeySpec& spec, const JsonValue& value);
  void ReadOptimizer(const JsonValue* block);
  void ReadScheduler(const JsonValue* block);
  void ReadParams(const VariantSpec& variant, const JsonValue* params, std::string_view block);
  void RefuseOptimizer(const JsonValue& type);

  const Marks& marks_;
  Findings& findings_;
  Settings settings_;
};

void Reader::ReadBlock(const JsonValue& block, const std::string& path, UnknownKeys unknown) {
  for (const JsonMember& member : block.members) {
    const std::string inner = path.empty() ? member.name : Concat(path, ".", member.name);
    const KeySpec* spec = FindKey(inner);
    // A dot inside a key must not reach into another block.
    if (spec == nullptr || member.name.find('.') != std::string::npos) {
      ReadUnknown(member, inner, unknown);
    } else {
      ReadKey(*spec, member.value);
    }
  }
}

void Reader::ReadUnknown(const JsonMember& member, const std::string& path, UnknownKeys unknown) {
  if (unknown == UnknownKeys::kOpaque) return;
  const std::string advice = AdviceForUnknownKey(path);
  const std::string_view separator = advice.empty() ? "" : "; ";
  if (unknown == UnknownKeys::kForbid) {
    findings_.Error(member.at, Concat("unknown key ", path, separator, advice));
  } else {
    const std::string_view stop = absl::EndsWith(advice, "?") ? "" : ".";
    findings_.Warn(member.at,
                   Concat("Unknown key ", path, " has no effect", separator, advice, stop));
  }
}

void Reader::ReadKey(const KeySpec& spec, const JsonValue& value) {
  const bool auto_is_a_value = (spec.flags & kAutoValue) != 0;
  if (!auto_is_a_value && ContainsAuto(value)) {
    findings_.Unresolved(spec.path, value.at);
    return;
  }
  if (spec.status == KeyStatus::kAlias) return;  // rewritten before
  if (value.kind == Kind::kNull && spec.type != KeyType::kNumberish) {
    if ((spec.flags & kNullable) == 0) {
      findings_.Error(value.at, Concat(spec.path, " is null; give it a value or remove it"));
    }
    return;
  }
  if (spec.type == KeyType::kBlock) {
    ReadInnerBlock(spec, value);
  } else {
    ReadScalar(spec, value);
  }
}

void Reader::ReadInnerBlock(const KeySpec& spec, const JsonValue& value) {
  if (!value.is_object()) {
    findings_.Error(value.at, Concat(spec.path, " must be a block in braces, and is ",
                                     Shorten(RenderJson(value), 40)));
    return;
  }
  if (spec.status == KeyStatus::kRefused && !spec.note.empty()) {
    findings_.Error(value.at, Concat(spec.path, " is refused: ", spec.note));
    return;
  }
  if (spec.status == KeyStatus::kNoEffect && spec.unknown == UnknownKeys::kOpaque) {
    findings_.NoEffect(spec.path, spec.note);
    return;
  }
  ReadBlock(value, std::string(spec.path), spec.unknown);
}

void Reader::ReadScalar(const KeySpec& spec, const JsonValue& value) {
  const bool refused = spec.status == KeyStatus::kRefused;
  if (refused && spec.default_value.empty()) {
    findings_.Error(value.at, Concat(spec.path, " is refused: ", spec.note));
    return;
  }
  absl::StatusOr<NormalisedValue> normalised = NormaliseValue(spec, value);
  if (!normalised.ok()) {
    findings_.Error(value.at, Concat(spec.path, " ", Std(normalised.status().message())));
    return;
  }
  if (!normalised->warning.empty()) {
    findings_.Warn(value.at, Concat(spec.path, ": ", normalised->warning, "."));
  }
  if (refused && !SameJson(normalised->value, DefaultValue(spec))) {
    findings_.Error(value.at, Concat(spec.path, " is ", RenderJson(normalised->value),
                                     ", which is refused: ", spec.note));
    return;
  }
  if (spec.status == KeyStatus::kNoEffect) findings_.NoEffect(spec.path, spec.note);
  Setting setting{.spec = &spec,
                  .value = std::move(normalised->value),
                  .origin = ValueOrigin::kFile,
                  .note = ""};
  if (const auto mark = marks_.find(spec.path); mark != marks_.end()) {
    setting.origin = mark->second.origin;
    setting.note = mark->second.note;
  }
  settings_.Set(std::move(setting));
}

// The parameter of that name, or null with advice: the one that was meant, or all there are.
const KeySpec* FindParam(const VariantSpec& variant, std::string_view name, std::string& advice) {
  advice = "it takes ";
  for (const KeySpec& spec : variant.params) {
    const std::string_view leaf = LeafName(spec.path);
    if (leaf == name) return &spec;
    if (spec.status == KeyStatus::kRefused) continue;
    if (&spec != &variant.params.front()) advice += ", ";
    advice += leaf;
  }
  constexpr std::size_t kLongestTypo = 64;
  for (const KeySpec& spec : variant.params) {
    const std::string_view leaf = LeafName(spec.path);
    if (name.size() > kLongestTypo || EditDistance(name, leaf) > 2) continue;
    advice = Concat("did you mean ", leaf, "?");
  }
  return nullptr;
}

void Reader::ReadParams(const VariantSpec& variant, const JsonValue* params,
                        std::string_view block) {
  const JsonValue none;
  const JsonValue& given = params != nullptr && params->is_object() ? *params : none;
  for (const JsonMember& member : given.members) {
    std::string advice;
    if (const KeySpec* spec = FindParam(variant, member.name, advice); spec != nullptr) {
      ReadKey(*spec, member.value);
      continue;
    }
    findings_.Error(member.at, Concat(variant.type, " has no parameter ", block, ".",
                                      Shorten(member.name, 64), "; ", advice));
  }
  for (const KeySpec& spec : variant.params) {
    const bool required = spec.status == KeyStatus::kHonoured && spec.default_value.empty();
    if (required && given.Find(LeafName(spec.path)) == nullptr) {
      findings_.Error(given.at, Concat(spec.path, " must be given with ", variant.type));
    }
  }
}

void Reader::RefuseOptimizer(const JsonValue& type) {
  std::string lower = type.text;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  const auto others = OptimizersNotHere();
  std::string why = "is no known optimizer";
  if (std::find(others.begin(), others.end(), std::string_view(lower)) != others.end()) {
    why = "is not in this build";
  }
  std::string advice = "known are ";
  const auto known = OptimizerVariants();
  for (const VariantSpec& variant : known) {
    if (&variant == &known.back())
      advice += " and ";
    else if (&variant != &known.front())
      advice += ", ";
    advice += variant.type;
  }
  if (lower == "sgd") advice = "write SGD (PyTorch's names keep their capitals)";
  findings_.Error(type.at,
                  Concat("optimizer.type ", Shorten(RenderJson(type), 80), " ", why, "; ", advice));
}

void Reader::ReadOptimizer(const JsonValue* block) {
  if (block == nullptr || !block->is_object()) return;
  const JsonValue* type = block->Find("type");
  const JsonValue* params = block->Find("params");
  if (type == nullptr || type->kind == Kind::kNull) {
    if (params != nullptr) {
      findings_.NoEffect("optimizer.params", "optimizer.type is not given");
    }
    return;
  }
  if (type->kind != Kind::kString || type->text == "auto") return;  // reported before
  for (const VariantSpec& variant : OptimizerVariants()) {
    // DeepSpeed lower-cases the names of its own optimizers and leaves PyTorch's alone.
    const bool own = variant.type != "SGD";
    if (own ? absl::EqualsIgnoreCase(Abs(variant.type), type->text) : variant.type == type->text) {
      settings_.optimizer = &variant;
    }
  }
  if (settings_.optimizer == nullptr) {
    RefuseOptimizer(*type);
    return;
  }
  ReadParams(*settings_.optimizer, params, "optimizer.params");
}

void Reader::ReadScheduler(const JsonValue* block) {
  if (block == nullptr || !block->is_object()) return;
  const JsonValue* type = block->Find("type");
  const JsonValue* params = block->Find("params");
  if (type == nullptr || type->kind == Kind::kNull) {
    if (params != nullptr) {
      findings_.NoEffect("scheduler.params", "scheduler.type is not given");
    }
    return;
  }
  if (type->kind != Kind::kString || type->text == "auto") return;
  for (const VariantSpec& variant : SchedulerVariants()) {
    if (variant.type == type->text) settings_.scheduler = &variant;
  }
  if (settings_.scheduler == nullptr) {
    findings_.Error(type->at,
                    Concat("scheduler.type ", Shorten(RenderJson(*type), 80),
                           " is not known; known are WarmupLR, WarmupDecayLR, WarmupCosineLR, "
                           "OneCycle and LRRangeTest; PyTorch's schedulers are given to "
                           "initialize() as an object"));
    return;
  }
  ReadParams(*settings_.scheduler, params, "scheduler.params");
}

}  // namespace

Settings ReadSettings(const JsonValue& root, const Marks& marks, Findings& findings) {
  return Reader(marks, findings).Run(root);
}

}  // namespace zeroshard
