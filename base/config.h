// Where configuration enters a process: YAML files and environment variables. Knows no key by name.
//
// A program reads a YAML mapping through YamlNode: each typed getter names the key, and Finish()
// reports keys that nobody asked for. Every error is InvalidArgument (NotFound or PermissionDenied
// for the file itself) and says file, line, key path, what was found and what was expected:
//
//   zeroshardd.yaml:7: workers.devices: expected a list, found "cpu:0"
//
// Not synchronised: one thread at a time, except Env, which any thread may call while nobody
// changes the environment.

#ifndef ZEROSHARD_BASE_CONFIG_H_
#define ZEROSHARD_BASE_CONFIG_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard {

// The environment variable, or nothing where it is unset. The only reader of the environment.
std::optional<std::string> Env(const std::string& name);

// Arms the fault points named in ZEROSHARD_FAULTS (base/fault_point.h); OK where it is unset. The
// value "list" writes the names of all points of this program to stdout, one a line, and ends the
// process.
absl::Status ArmFaultPointsFromEnv();

// The content of a regular file of at most `max_bytes`. A directory, a missing file and a longer
// one are errors that say so.
absl::StatusOr<std::string> ReadConfigFile(const std::string& path, size_t max_bytes = 1 << 20);

// "4096", "64KiB", "1.5GiB", "2GB" and so on, as bytes.
absl::StatusOr<uint64_t> ParseByteSize(std::string_view text);

struct IntRange {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};

// One mapping of a YAML document. Copies share the record of which keys were read.
class YamlNode {
 public:
  // The top-level mapping; an empty document is an empty mapping. `source` names it in errors.
  static absl::StatusOr<YamlNode> Parse(std::string_view text, std::string_view source);
  static absl::StatusOr<YamlNode> ParseFile(const std::string& path);

  bool Has(std::string_view key) const;

  // The value of `key`, or `fallback` where the key is absent or null.
  absl::StatusOr<std::string> String(std::string_view key, std::string_view fallback) const;
  absl::StatusOr<int64_t> Int(std::string_view key, int64_t fallback, IntRange range = {}) const;
  absl::StatusOr<double> Double(std::string_view key, double fallback) const;
  absl::StatusOr<bool> Bool(std::string_view key, bool fallback) const;
  absl::StatusOr<uint64_t> Bytes(std::string_view key, uint64_t fallback) const;
  absl::StatusOr<absl::Duration> Duration(std::string_view key, absl::Duration fallback) const;
  absl::StatusOr<std::vector<std::string>> Strings(std::string_view key) const;

  // Absent keys are errors here.
  absl::StatusOr<std::string> RequiredString(std::string_view key) const;

  // The mapping at `key`; an empty one where the key is absent.
  absl::StatusOr<YamlNode> Child(std::string_view key) const;

  // The list of mappings at `key`; empty where the key is absent. Where `shorthand` is given, a
  // text in the list stands for the mapping {shorthand: text}.
  absl::StatusOr<std::vector<YamlNode>> Children(std::string_view key,
                                                 std::string_view shorthand = "") const;

  // The keys of this mapping, in the order of the file; they do not count as read.
  std::vector<std::string> Keys() const;

  // An error at the place of `key`: for rules that the caller checks.
  absl::Status Error(std::string_view key, std::string_view problem) const;

  // InvalidArgument naming every key, here and in all nodes below, that no getter has asked for.
  absl::Status Finish() const;

 private:
  struct Impl;
  explicit YamlNode(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_CONFIG_H_
