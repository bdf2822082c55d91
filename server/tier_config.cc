#include "server/tier_config.h"

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/extent_plan.h"
#include "storage/io_queue.h"

namespace zeroshard {
namespace {

absl::Status ReadPaths(const YamlNode& yaml, TierConfig& config) {
  ZS_ASSIGN_OR_RETURN(const std::vector<YamlNode> entries, yaml.Children("nvme_paths", "path"));
  for (const YamlNode& entry : entries) {
    NvmePathConfig path;
    ZS_ASSIGN_OR_RETURN(const std::string text, entry.RequiredString("path"));
    absl::StatusOr<std::string> normalised = NormaliseNvmePath(text);
    if (!normalised.ok()) return entry.Error("path", Std(normalised.status().message()));
    path.path = *std::move(normalised);
    ZS_ASSIGN_OR_RETURN(const int64_t weight, entry.Int("weight", static_cast<int64_t>(path.weight),
                                                        {1, int64_t{kMaxPathWeight}}));
    path.weight = static_cast<uint64_t>(weight);
    ZS_ASSIGN_OR_RETURN(path.allow_network_path, entry.Bool("allow_network_path", false));
    config.nvme_paths.push_back(std::move(path));
  }
  return absl::OkStatus();
}

std::string PathText(const NvmePathConfig& path) {
  return absl::StrCat("\n  - {path: ", QuoteForLog(path.path), ", weight: ", path.weight,
                      ", allow_network_path: ", path.allow_network_path ? "true" : "false", "}");
}

}  // namespace

absl::Status ReadTiers(const YamlNode& yaml, TierConfig& config) {
  ZS_RETURN_IF_ERROR(ReadPaths(yaml, config));
  ZS_ASSIGN_OR_RETURN(config.nvme_limit, yaml.Bytes("nvme_limit", config.nvme_limit));
  ZS_ASSIGN_OR_RETURN(config.nvme_write_budget,
                      yaml.Bytes("nvme_write_budget", config.nvme_write_budget));
  ZS_ASSIGN_OR_RETURN(const std::string backend,
                      yaml.String("io_backend", NameOf(config.io_backend)));
  absl::StatusOr<IoBackend> parsed = ParseIoBackend(backend);
  if (!parsed.ok()) return yaml.Error("io_backend", Std(parsed.status().message()));
  config.io_backend = *parsed;
  ZS_ASSIGN_OR_RETURN(config.io_timeout, yaml.Duration("io_timeout", config.io_timeout));
  ZS_ASSIGN_OR_RETURN(config.io_bytes_per_second,
                      yaml.Bytes("io_bytes_per_second", config.io_bytes_per_second));
  ZS_ASSIGN_OR_RETURN(const int64_t depth,
                      yaml.Int("io_depth", config.io_depth, {0, int64_t{kMaxIoDepth}}));
  config.io_depth = static_cast<uint32_t>(depth);
  ZS_ASSIGN_OR_RETURN(config.huge_pages, yaml.Bool("huge_pages", config.huge_pages));
  ZS_ASSIGN_OR_RETURN(config.require_pinned, yaml.Bool("require_pinned", config.require_pinned));
  ZS_ASSIGN_OR_RETURN(config.job_host_limit, yaml.Bytes("job_host_limit", config.job_host_limit));
  ZS_ASSIGN_OR_RETURN(config.job_nvme_limit, yaml.Bytes("job_nvme_limit", config.job_nvme_limit));
  return absl::OkStatus();
}

absl::Status ApplyNvmePathFlags(const std::vector<std::string>& flags, TierConfig& config) {
  if (flags.empty()) return absl::OkStatus();
  config.nvme_paths.clear();
  for (const std::string& flag : flags) {
    absl::StatusOr<NvmePathConfig> path = ParseNvmePath(flag);
    if (!path.ok()) return Annotate(path.status(), "--nvme-path");
    config.nvme_paths.push_back(*std::move(path));
  }
  return absl::OkStatus();
}

absl::Status CheckTiers(const TierConfig& config) {
  ZS_RETURN_IF_ERROR(Annotate(CheckNvmePaths(config.nvme_paths), "nvme_paths"));
  if (config.io_timeout < absl::Milliseconds(10) || config.io_timeout > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat("io_timeout: expected 10ms to 24h, found ",
                                                   absl::FormatDuration(config.io_timeout)));
  }
  return absl::OkStatus();
}

std::string TierText(const TierConfig& config) {
  std::string text = config.nvme_paths.empty() ? "nvme_paths: []" : "nvme_paths:";
  for (const NvmePathConfig& path : config.nvme_paths) text += PathText(path);
  const auto truth = [](bool value) { return value ? "true" : "false"; };
  absl::StrAppend(&text, "\nnvme_limit: ", config.nvme_limit,
                  "\nnvme_write_budget: ", config.nvme_write_budget,
                  "\nio_backend: ", Abs(NameOf(config.io_backend)),
                  "\nio_timeout: ", absl::FormatDuration(config.io_timeout),
                  "\nio_bytes_per_second: ", config.io_bytes_per_second,
                  "\nio_depth: ", config.io_depth, "\nhuge_pages: ", truth(config.huge_pages),
                  "\nrequire_pinned: ", truth(config.require_pinned),
                  "\njob_host_limit: ", config.job_host_limit,
                  "\njob_nvme_limit: ", config.job_nvme_limit, "\n");
  return text;
}

}  // namespace zeroshard
