#include <array>
#include <cstdlib>
#include <optional>

#include "server/ds_config_settings.h"
#include "server/text.h"

// Step 4: DeepSpeed's defaults, and which of them depend on its version.

namespace zeroshard {
namespace {

using Version = std::array<int, 3>;

constexpr Version kNewestKnown = {0, 19, 6};

// Defaults that moved in 2026: the first release with the table's value, and the value before.
struct MovedDefault {
  std::string_view path;
  Version since;
  std::string_view before;
};
constexpr MovedDefault kMoved[] = {
    {"gradient_clipping", {0, 19, 3}, "0.0"},
    {"bf16.check_grad_overflow", {0, 19, 3}, "false"},
    {"zero_optimization.offload_param.pin_memory", {0, 19, 5}, "false"},
    {"zero_optimization.offload_optimizer.pin_memory", {0, 19, 5}, "false"},
};

// "0.19.6" -> {0, 19, 6}; also two parts ("0.19"), and a suffix behind '+' or '-'.
std::optional<Version> ParseVersion(std::string_view text) {
  text = text.substr(0, text.find_first_of("+-"));
  Version version = {0, 0, 0};
  std::size_t part = 0;
  bool digits = false;
  for (const char c : text) {
    if (c >= '0' && c <= '9' && version[part] < 100000) {
      version[part] = version[part] * 10 + (c - '0');
      digits = true;
    } else if (c == '.' && digits && part + 1 < version.size()) {
      ++part;
      digits = false;
    } else {
      return std::nullopt;
    }
  }
  if (!digits || part == 0) return std::nullopt;
  return version;
}

// The version whose defaults hold; the newest known one when the text is no version (an error).
Version CompatVersion(const Settings& settings, Findings& findings) {
  constexpr std::string_view kPath = "zeroshard.compat_version";
  if (!settings.Has(kPath)) return kNewestKnown;
  const std::string text = settings.Text(kPath);
  const std::optional<Version> version = ParseVersion(text);
  if (!version.has_value()) {
    findings.Error(settings.At(kPath),
                   Concat(kPath, " is ", JsonQuote(text), "; expected a version such as 0.19.6"));
    return kNewestKnown;
  }
  if (*version > kNewestKnown) {
    findings.Warn(settings.At(kPath),
                  Concat(kPath, " ", text, " is newer than 0.19.6: the defaults of 0.19.6 hold."));
  }
  return *version;
}

void FillOne(const KeySpec& spec, const Version& version, const std::string& compat_text,
             Settings& settings) {
  const bool has_default = !spec.default_value.empty();
  if (!has_default || spec.status == KeyStatus::kAlias || spec.type == KeyType::kBlock ||
      settings.Find(spec.path) != nullptr) {
    return;
  }
  Setting setting{
      .spec = &spec, .value = DefaultValue(spec), .origin = ValueOrigin::kDefault, .note = ""};
  for (const MovedDefault& moved : kMoved) {
    if (moved.path != spec.path || version >= moved.since) continue;
    KeySpec earlier = spec;
    earlier.default_value = moved.before;
    setting.value = DefaultValue(earlier);
    setting.origin = ValueOrigin::kCompat;
    setting.note = Concat("the default of DeepSpeed ", compat_text);
  }
  settings.Set(std::move(setting));
}

}  // namespace

void FillDefaults(Settings& settings, Findings& findings) {
  const Version version = CompatVersion(settings, findings);
  const std::string compat_text = Shorten(settings.Text("zeroshard.compat_version"), 40);
  for (const KeySpec* spec : AllKeys()) FillOne(*spec, version, compat_text, settings);
  for (const VariantSpec* variant : {settings.optimizer, settings.scheduler}) {
    if (variant == nullptr) continue;
    for (const KeySpec& spec : variant->params) FillOne(spec, version, compat_text, settings);
  }
}

}  // namespace zeroshard
