#include "server/nvme_paths.h"

#include <algorithm>
#include <climits>
#include <set>

#include "absl/strings/numbers.h"
#include "base/log.h"
#include "base/status.h"
#include "server/text.h"
#include "storage/extent_plan.h"

namespace zeroshard {
namespace {

constexpr size_t kMaxShown = 200;

std::string Quoted(std::string_view text) { return QuoteForLog(Shorten(text, kMaxShown)); }

bool HasControlCharacter(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return true;
  }
  return false;
}

absl::Status CheckWeight(uint64_t weight) {
  if (weight >= 1 && weight <= kMaxPathWeight) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("expected a weight from 1 to ", kMaxPathWeight, ", found ", weight));
}

// The path of the list that `path` is or lies beneath, the longest of several; null for none.
const NvmePathConfig* RootOf(std::string_view path, std::span<const NvmePathConfig> daemon) {
  const NvmePathConfig* root = nullptr;
  for (const NvmePathConfig& candidate : daemon) {
    if (!IsBeneath(path, candidate.path)) continue;
    if (root == nullptr || candidate.path.size() > root->path.size()) root = &candidate;
  }
  return root;
}

std::string ListOf(std::span<const NvmePathConfig> paths) {
  std::string list;
  for (const NvmePathConfig& path : paths) {
    list += Concat(list.empty() ? "" : ", ", Quoted(path.path));
  }
  return list;
}

}  // namespace

bool IsBeneath(std::string_view path, std::string_view root) {
  if (root == "/") return true;
  return path.starts_with(root) && (path.size() == root.size() || path[root.size()] == '/');
}

absl::StatusOr<std::string> NormaliseNvmePath(std::string_view text) {
  const auto refuse = [&](std::string_view expected) {
    return absl::InvalidArgumentError(
        Concat("expected an absolute path", expected, ", found ", Quoted(text)));
  };
  if (text.empty() || text.front() != '/') return refuse("");
  if (text.size() >= PATH_MAX) return refuse(Concat(" of at most ", PATH_MAX - 1, " bytes"));
  if (HasControlCharacter(text)) return refuse(" without control characters");
  std::string path;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t slash = std::min(rest.find('/'), rest.size());
    const std::string_view part = rest.substr(0, slash);
    if (part == "..") return refuse(" without \"..\"");
    if (!part.empty() && part != ".") path += Concat("/", part);
    rest.remove_prefix(std::min(slash + 1, rest.size()));
  }
  return path.empty() ? "/" : path;
}

absl::StatusOr<NvmePathConfig> ParseNvmePath(std::string_view text) {
  NvmePathConfig config;
  const size_t equals = text.rfind('=');
  if (equals != std::string_view::npos) {
    if (!absl::SimpleAtoi(Abs(text.substr(equals + 1)), &config.weight)) {
      return absl::InvalidArgumentError(
          Concat("expected PATH or PATH=WEIGHT with a whole number, found ", Quoted(text),
                 "; a path with '=' in it can be given in the configuration file"));
    }
    text = text.substr(0, equals);
  }
  ZS_ASSIGN_OR_RETURN(config.path, NormaliseNvmePath(text));
  ZS_RETURN_IF_ERROR(CheckWeight(config.weight));
  return config;
}

absl::Status CheckNvmePaths(std::span<const NvmePathConfig> paths) {
  if (paths.size() > kMaxExtentPaths) {
    return absl::InvalidArgumentError(
        Concat("expected at most ", kMaxExtentPaths, " paths, found ", paths.size()));
  }
  std::set<std::string> seen;
  for (const NvmePathConfig& path : paths) {
    ZS_RETURN_IF_ERROR(Annotate(CheckWeight(path.weight), path.path));
    if (!seen.insert(path.path).second) {
      return absl::InvalidArgumentError(
          Concat(Quoted(path.path), " is named twice; a weight gives it more than others"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<NvmePathConfig>> PathsOfJob(std::string_view wanted,
                                                       std::span<const NvmePathConfig> daemon,
                                                       PathRight right) {
  if (wanted.empty()) {
    if (daemon.empty()) {
      return absl::FailedPreconditionError(
          "the job has states on nvme, and neither nvme_path in its ds_config nor the daemon's "
          "nvme_paths say where; give the daemon --nvme-path DIRECTORY, or write nvme_path");
    }
    return std::vector<NvmePathConfig>(daemon.begin(), daemon.end());
  }
  absl::StatusOr<std::string> path = NormaliseNvmePath(wanted);
  if (!path.ok()) return Annotate(path.status(), "nvme_path");
  NvmePathConfig chosen;
  chosen.path = *std::move(path);
  if (const NvmePathConfig* root = RootOf(chosen.path, daemon); root != nullptr) {
    chosen.weight = root->weight;
    chosen.allow_network_path = root->allow_network_path;
  } else if (right != PathRight::kAny) {
    return absl::PermissionDeniedError(
        Concat("nvme_path ", Quoted(chosen.path), " is not beneath the daemon's nvme_paths (",
               daemon.empty() ? "it has none" : ListOf(daemon),
               "), and only the daemon's own user and root may name another directory; ",
               daemon.empty() ? "" : "leave nvme_path out to use the daemon's, or ",
               "have the operator add it to nvme_paths"));
  }
  return std::vector<NvmePathConfig>{std::move(chosen)};
}

}  // namespace zeroshard
