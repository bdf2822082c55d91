#ifndef ZEROSHARD_SERVER_DS_CONFIG_SETTINGS_H_
#define ZEROSHARD_SERVER_DS_CONFIG_SETTINGS_H_

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/devices.h"
#include "server/ds_config.h"
#include "server/ds_config_keys.h"
#include "server/hjson.h"

// Internal to ds_config: what the steps of reading a configuration hand to one another.
// Values of one thread.

namespace zeroshard {

// Collects what is wrong with a file and what its owner should know, in the order found.
class Findings {
 public:
  void Error(SourcePosition at, std::string_view what);
  void Warn(SourcePosition at, std::string_view sentence);
  // Keys without effect for the same reason are named in one sentence.
  void NoEffect(std::string_view path, std::string_view reason);
  void Unresolved(std::string_view path, SourcePosition at);

  bool HasErrors() const { return !errors_.empty() || !unresolved_.empty(); }
  // OK, or one InvalidArgument with every error.
  absl::Status ToStatus() const;
  std::vector<std::string> Warnings() const;

 private:
  std::vector<std::string> errors_;
  std::vector<std::string> unresolved_;
  std::vector<std::string> warnings_;
  std::vector<std::pair<std::string, std::vector<std::string>>> no_effect_;  // reason, paths
};

// Where a value came from when it is not plainly the file's.
struct Mark {
  ValueOrigin origin = ValueOrigin::kFile;
  std::string note;
};
using Marks = std::map<std::string, Mark, std::less<>>;

struct Setting {
  const KeySpec* spec = nullptr;
  JsonValue value;  // normalised: integers as digits, choices as the table spells them
  ValueOrigin origin = ValueOrigin::kDefault;
  std::string note;
};

// Canonical path -> value. Values were checked against the table when they were set, so the
// getters cannot fail; a path that is missing or null gives 0, false or "".
class Settings {
 public:
  void Set(Setting setting);
  const Setting* Find(std::string_view path) const;

  // Whether file or client set it (defaults do not count), to something else than null.
  bool Given(std::string_view path) const;
  // Whether it has a value other than null.
  bool Has(std::string_view path) const;

  std::int64_t Int(std::string_view path) const;
  std::optional<std::int64_t> OptionalInt(std::string_view path) const;
  double Float(std::string_view path) const;
  bool Bool(std::string_view path) const;
  std::string Text(std::string_view path) const;
  SourcePosition At(std::string_view path) const;

  // The parameters that the chosen optimizer and schedule take; null while none is chosen.
  const VariantSpec* optimizer = nullptr;
  const VariantSpec* scheduler = nullptr;
  // What the daemon works on.
  DeviceKind devices = DeviceKind::kCpu;

 private:
  const JsonValue* Value(std::string_view path) const;
  std::map<std::string, Setting, std::less<>> settings_;
};

// Step 1: renames aliases and rewrites deprecated forms in the tree.
void RewriteLegacyForms(JsonValue& root, Marks& marks, Findings& findings);
// Step 2: puts the client's values into the tree.
void ApplyClientValues(const ClientValues& client, JsonValue& root, Marks& marks,
                       Findings& findings);
// Step 3: checks every key of the tree against the tables.
Settings ReadSettings(const JsonValue& root, const Marks& marks, Findings& findings);
// Step 4: fills in DeepSpeed's defaults, those of the version that zeroshard.compat_version names.
void FillDefaults(Settings& settings, Findings& findings);
// Step 5: one value each for the form of master parameters and optimizer states.
void SettleStateForms(Settings& settings, Findings& findings);
// What the offload blocks come to. Paths that CheckNvme refuses are left out.
TierUse TierUseOf(const Settings& settings);
// Step 6: rules between keys; those of the offload blocks and aio.
void CheckNvme(const Settings& settings, Findings& findings);
// Of what a job on GPUs cannot be.
void CheckGpu(const Settings& settings, Findings& findings);
// All rules.
void CheckRules(const Settings& settings, Findings& findings);
// Names those of the keys that the file or the client set.
void NameIdle(std::initializer_list<std::string_view> paths, std::string_view reason,
              const Settings& settings, Findings& findings);
// Step 7: the plain structure. `settings` has passed all checks.
DsConfig BuildDsConfig(const Settings& settings);
void AppendResolvedValues(const Settings& settings, DsConfig& config);

// A value checked and normalised for its key.
struct NormalisedValue {
  JsonValue value;
  std::string warning;  // a clause: "true is taken as 1"; empty: none
};
// InvalidArgument says what was found and what was expected. `value` is neither null nor "auto".
absl::StatusOr<NormalisedValue> NormaliseValue(const KeySpec& spec, const JsonValue& value);

// The default of a row as a value; null when it has none.
JsonValue DefaultValue(const KeySpec& spec);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DS_CONFIG_SETTINGS_H_
