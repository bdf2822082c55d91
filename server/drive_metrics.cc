#include "server/drive_metrics.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "server/job_metrics.h"
#include "server/node_memory.h"

namespace zeroshard {
namespace {

const char* HelpOf(const std::string& name) {
  for (const MetricDescription& one : AllMetrics()) {
    if (name == one.name) return one.help;
  }
  ZS_CHECK(false, name);
}

std::string BudgetNote(IoWarning warning, const std::string& path, const IoBudget::Usage& usage,
                       uint64_t budget) {
  constexpr uint64_t seconds_a_day = 86400;
  const std::string written = absl::StrFormat(
      "%s: %s written today (UTC), %.0f %% of nvme_write_budget (%s)", path,
      HumanBytes(usage.written_today), 100 * usage.budget_ratio, HumanBytes(budget));
  if (warning == IoWarning::kWritesNearBudget) {
    return written + "; when it is used up, writes to this path are slowed";
  }
  return absl::StrCat(written, "; until midnight all jobs together write at ",
                      HumanBytes(budget / seconds_a_day), "/s there");
}

}  // namespace

DriveMetrics::DriveMetrics(std::shared_ptr<MetricsTable> table, IoBudget budget,
                           const DriveMetricsOptions& options)
    : table_(std::move(table)),
      budget_(std::move(budget)),
      watch_(options.sources, options.interval) {}

void DriveMetrics::Count(const std::string& name, const MetricLabels& labels, double total) {
  double& before = totals_[{name, labels}];
  // What counts anew (another drive) grows the series from where it is.
  const double growth = total >= before ? total - before : total;
  table_->GetCounter(name, HelpOf(name), labels)->Increment(growth);
  before = total;
}

void DriveMetrics::Set(const std::string& name, const MetricLabels& labels, double value) {
  table_->GetGauge(name, HelpOf(name), labels)->Set(value);
}

void DriveMetrics::SetIfKnown(const std::string& name, const MetricLabels& labels,
                              const std::optional<double>& value) {
  if (value) known_.insert({name, labels});
  if (!known_.contains({name, labels})) return;
  Set(name, labels, value.value_or(std::numeric_limits<double>::quiet_NaN()));
}

void DriveMetrics::Remove(const std::string& job) {
  std::erase_if(totals_, [&](const auto& entry) {
    const MetricLabels& labels = entry.first.second;
    const auto it = labels.find("job");
    return it != labels.end() && it->second == job;
  });
}

void DriveMetrics::UpdateDevice(uint32_t device, std::vector<DriveNote>& notes) {
  const std::string path = budget_.path(device);
  const MetricLabels labels = {{"path", path}};
  const IoBudget::Usage usage = budget_.usage(device);
  const uint64_t write_budget = budget_.limits(device).write_budget;
  Count("zeroshard_nvme_wait_seconds_total", labels, usage.wait_seconds);
  Count("zeroshard_nvme_overdrafts_total", labels, static_cast<double>(usage.overdrafts));
  if (write_budget > 0) Set("zeroshard_nvme_write_budget_ratio", labels, usage.budget_ratio);
  if (const std::optional<IoWarning> warning = budget_.TakeWarning(device)) {
    notes.push_back({LogLevel::kWarn, BudgetNote(*warning, path, usage, write_budget)});
  }
}

void DriveMetrics::Compare(const std::string& path, const DriveHealth& drive,
                           std::vector<DriveNote>& notes) {
  Said& said = said_[path + "\n" + drive.name];
  const std::string name = absl::StrCat(path, ": ", DescribeDrive(drive));
  if ((drive.critical_warning & ~said.critical_warning) != 0) {
    notes.push_back(
        {LogLevel::kWarn, absl::StrCat(name, ": the drive warns: ",
                                       DescribeCriticalWarning(drive.critical_warning))});
  }
  said.critical_warning = drive.critical_warning;
  const uint64_t errors = drive.media_errors.value_or(said.media_errors);
  if (errors > said.media_errors) {
    notes.push_back({LogLevel::kWarn,
                     absl::StrCat(name, ": ", errors - said.media_errors, " new media errors")});
  }
  said.media_errors = errors;
  const bool used_up = drive.used_percent.value_or(0) >= 100;
  if (used_up && !said.used_up) {
    notes.push_back(
        {LogLevel::kWarn, absl::StrCat(name, ": the life that its maker expects is used up")});
  }
  said.used_up = used_up;
}

void DriveMetrics::UpdateHealth(const std::string& path, const PathHealth& health,
                                std::vector<DriveNote>& notes) {
  const bool first = known_paths_.insert(path).second;
  if (first && !health.status.ok()) {
    notes.push_back(
        {LogLevel::kInfo,
         absl::StrCat(path, ": the health of its drives is not known: ", health.status.message())});
  }
  std::optional<double> temperature;
  std::optional<double> used;
  std::optional<double> errors;
  std::optional<double> written;
  for (const DriveHealth& drive : health.drives) {
    if (first) {
      // Errors of long ago are told here; only later ones are warned of.
      said_[path + "\n" + drive.name].media_errors = drive.media_errors.value_or(0);
      notes.push_back({LogLevel::kInfo, absl::StrCat(path, " lies on ", DescribeDrive(drive))});
      for (const std::string& why : drive.missing) {
        notes.push_back({LogLevel::kInfo, absl::StrCat(path, ": ", drive.name, ": ", why)});
      }
    }
    Compare(path, drive, notes);
    if (drive.temperature_celsius) {
      temperature = std::max(temperature.value_or(-1000), *drive.temperature_celsius);
    }
    if (drive.used_percent) used = std::max(used.value_or(0), *drive.used_percent);
    if (drive.media_errors) {
      errors = errors.value_or(0) + static_cast<double>(*drive.media_errors);
    }
    if (drive.written_bytes) {
      written = written.value_or(0) + static_cast<double>(*drive.written_bytes);
    }
  }
  const MetricLabels labels = {{"path", path}};
  SetIfKnown("zeroshard_drive_temperature_celsius", labels, temperature);
  SetIfKnown("zeroshard_drive_used_percent", labels, used);
  if (errors) Count("zeroshard_drive_media_errors_total", labels, *errors);
  if (written) Count("zeroshard_drive_written_bytes_total", labels, *written);
}

std::vector<DriveNote> DriveMetrics::Update() {
  std::vector<DriveNote> notes;
  std::vector<std::string> paths;
  for (uint32_t device = 0; device < budget_.devices(); ++device) {
    paths.push_back(budget_.path(device));
    UpdateDevice(device, notes);
  }
  for (const IoBudget::JobBytes& job : budget_.job_bytes()) {
    const MetricLabels labels = {{"job", job.job}, {"path", paths[job.device]}};
    Count("zeroshard_nvme_read_bytes_total", labels, static_cast<double>(job.bytes[0]));
    Count("zeroshard_nvme_written_bytes_total", labels, static_cast<double>(job.bytes[1]));
  }
  watch_.Watch(paths);
  for (const auto& [path, health] : watch_.latest()) UpdateHealth(path, health, notes);
  return notes;
}

}  // namespace zeroshard
