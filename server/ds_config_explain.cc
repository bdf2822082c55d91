#include "server/ds_config_settings.h"
#include "server/hjson.h"
#include "server/text.h"

namespace zeroshard {
namespace {

// Defaults of keys without effect would bury the rest; a key that was written is always shown.
bool IsShown(const Setting& setting) {
  return setting.spec->status == KeyStatus::kHonoured || setting.origin != ValueOrigin::kDefault;
}

void AppendResolved(const KeySpec& spec, const Settings& settings, DsConfig& config) {
  const Setting* setting = settings.Find(spec.path);
  if (setting == nullptr || !IsShown(*setting)) return;
  ResolvedValue value{.path = std::string(spec.path),
                      .value_text = RenderJson(setting->value),
                      .origin = setting->origin,
                      .note = setting->note};
  if (spec.status == KeyStatus::kNoEffect) {
    value.note += Concat(value.note.empty() ? "" : "; ", "no effect: ", spec.note);
  }
  config.resolved.push_back(std::move(value));
}

}  // namespace

void AppendResolvedValues(const Settings& settings, DsConfig& config) {
  for (const KeySpec* spec : AllKeys()) {
    AppendResolved(*spec, settings, config);
    const VariantSpec* variant = nullptr;
    if (spec->path == "optimizer.params") variant = settings.optimizer;
    if (spec->path == "scheduler.params") variant = settings.scheduler;
    if (variant == nullptr) continue;
    for (const KeySpec& param : variant->params) AppendResolved(param, settings, config);
  }
}

std::string_view ValueOriginName(ValueOrigin origin) {
  switch (origin) {
    case ValueOrigin::kDefault:
      return "default";
    case ValueOrigin::kFile:
      return "file";
    case ValueOrigin::kClient:
      return "client";
    case ValueOrigin::kAlias:
      return "alias";
    case ValueOrigin::kCompat:
      return "compat";
  }
  return "unknown";
}

std::vector<std::string> ExplainLines(const DsConfig& config) {
  std::vector<std::string> lines;
  for (const ResolvedValue& value : config.resolved) {
    std::string line =
        Concat(value.path, " = ", value.value_text, "  (", ValueOriginName(value.origin));
    if (!value.note.empty()) line += Concat(": ", value.note);
    lines.push_back(line + ")");
  }
  for (const std::string& warning : config.warnings) lines.push_back("warning: " + warning);
  return lines;
}

std::string ExplainJson(const DsConfig& config) {
  std::string out = "{\"values\": [";
  for (const ResolvedValue& value : config.resolved) {
    if (&value != &config.resolved.front()) out += ", ";
    out += Concat("{\"path\": ", JsonQuote(value.path), ", \"value\": ");
    // Infinity and NaN, which steps_per_print may be, are no JSON: they become text.
    const bool strict = value.value_text.find_first_of("IN") == std::string::npos;
    out += strict ? value.value_text : JsonQuote(value.value_text);
    out += Concat(", \"origin\": ", JsonQuote(ValueOriginName(value.origin)),
                  ", \"note\": ", JsonQuote(value.note), "}");
  }
  out += "], \"warnings\": [";
  for (const std::string& warning : config.warnings) {
    if (&warning != &config.warnings.front()) out += ", ";
    out += JsonQuote(warning);
  }
  return out + "]}";
}

}  // namespace zeroshard
