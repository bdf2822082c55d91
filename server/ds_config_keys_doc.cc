#include <set>

#include "server/ds_config_keys.h"
#include "server/text.h"

// The tables of docs/ds_config.md, from the rows.

namespace zeroshard {
namespace {

std::string_view TypeName(KeyType type) {
  switch (type) {
    case KeyType::kBool:
      return "bool";
    case KeyType::kInt:
      return "int";
    case KeyType::kFloat:
      return "float";
    case KeyType::kText:
      return "text";
    case KeyType::kTextList:
      return "list of texts";
    case KeyType::kIntList:
      return "list of ints";
    case KeyType::kFloatPair:
      return "two floats";
    case KeyType::kFloatOrList:
      return "float or list";
    case KeyType::kNumberish:
      return "any";
    case KeyType::kBlock:
      return "block";
  }
  return "";
}

std::string_view StatusName(const KeySpec& spec) {
  switch (spec.status) {
    case KeyStatus::kHonoured:
      return (spec.flags & kTrainer) != 0 ? "honoured by the trainer's engine" : "honoured";
    case KeyStatus::kRefused:
      if (spec.type == KeyType::kBlock && spec.note.empty()) return "refused when enabled";
      return spec.default_value.empty() ? "refused" : "refused unless the default";
    case KeyStatus::kNoEffect:
      return "no effect";
    case KeyStatus::kAlias:
      return "alias";
  }
  return "";
}

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out.push_back('\\');
    out.push_back(c);
  }
  return out;
}

// " (none, cpu, nvme)"
std::string Choices(std::string_view choices) {
  if (choices.empty()) return "";
  std::string out = " (";
  for (const char c : choices) {
    if (c == '|') {
      out += ", ";
    } else {
      out.push_back(c);
    }
  }
  return out + ")";
}

std::string BlockRule(const KeySpec& spec) {
  if (spec.type != KeyType::kBlock || spec.status == KeyStatus::kAlias) return "";
  switch (spec.unknown) {
    case UnknownKeys::kForbid:
      return "unknown keys are errors";
    case UnknownKeys::kIgnore:
      return "unknown keys are warnings";
    case UnknownKeys::kOpaque:
      return "";
  }
  return "";
}

std::string Row(const KeySpec& spec) {
  std::string note;
  const auto add = [&note](std::string_view part) {
    if (!part.empty()) note += Concat(note.empty() ? "" : "; ", part);
  };
  if (spec.status == KeyStatus::kAlias) add(Concat("of `", spec.target, "`"));
  add(spec.note);
  add(BlockRule(spec));
  const std::string shown_default =
      spec.default_value.empty() ? std::string("-") : Concat("`", spec.default_value, "`");
  return Concat("| `", spec.path, "` | ", TypeName(spec.type), Choices(spec.choices), " | ",
                shown_default, " | ", StatusName(spec), " | ", Escaped(note), " |\n");
}

std::string Table(std::string_view title, std::span<const KeySpec> rows) {
  std::string out = Concat("## ", title, "\n\n| key | type | default | here | why |\n",
                           "| --- | --- | --- | --- | --- |\n");
  for (const KeySpec& spec : rows) out += Row(spec);
  return out + "\n";
}

}  // namespace

std::string RenderKeyTables() {
  std::string out = Table("Top level, optimizer, scheduler, zeroshard", TopKeys());
  out += Table("zero_optimization and aio", ZeroKeys());
  out += Table("Precision", PrecisionKeys());
  out += Table("Blocks of the training script", TrainerKeys());
  std::set<const KeySpec*> seen;
  for (const auto variants : {OptimizerVariants(), SchedulerVariants()}) {
    for (const VariantSpec& variant : variants) {
      if (!seen.insert(variant.params.data()).second) continue;
      std::string title;
      for (const VariantSpec& other : variants) {
        if (other.params.data() != variant.params.data()) continue;
        title += Concat(title.empty() ? "Parameters of " : " and ", other.type);
      }
      out += Table(title, variant.params);
    }
  }
  return out;
}

}  // namespace zeroshard
