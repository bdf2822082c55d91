// DriveMetrics: what the drives of the NVMe tier do and how they are, for Prometheus and the log.
//
// Takes what the I/O budget has counted, and the health of the drives behind its paths. The server
// makes one after the budget, and calls Update about once a second on the decision thread, after
// RemoveHolder of jobs that have ended. Families: docs/metrics.md.
#ifndef ZEROSHARD_SERVER_DRIVE_METRICS_H_
#define ZEROSHARD_SERVER_DRIVE_METRICS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/metrics.h"
#include "server/drive_watch.h"
#include "storage/io_budget.h"

namespace zeroshard {

struct DriveMetricsOptions {
  DriveSources sources = SystemDriveSources();
  absl::Duration interval = absl::Minutes(1);  // between readings of the drives' health
};

// A line for the log.
struct DriveNote {
  LogLevel level = LogLevel::kInfo;
  std::string text;
};

class DriveMetrics {
 public:
  DriveMetrics(std::shared_ptr<MetricsTable> table, IoBudget budget,
               const DriveMetricsOptions& options = {});

  // Brings all series up to date. Returns what is new to be said: which drives a path lies on and
  // what of them cannot be read (once), write budgets that are nearly or all used (once a day),
  // critical warnings, new media errors, a life that is used up.
  std::vector<DriveNote> Update();

  // The job has ended: what is counted under its name begins at 0 again. Its series go with
  // JobMetrics::Remove.
  void Remove(const std::string& job);

  const DriveWatch& watch() const { return watch_; }

 private:
  // What was said of a drive.
  struct Said {
    uint8_t critical_warning = 0;
    uint64_t media_errors = 0;
    bool used_up = false;
  };

  void Count(const std::string& name, const MetricLabels& labels, double total);
  void Set(const std::string& name, const MetricLabels& labels, double value);
  // NaN once it is absent; no series before it is there.
  void SetIfKnown(const std::string& name, const MetricLabels& labels,
                  const std::optional<double>& value);
  void UpdateDevice(uint32_t device, std::vector<DriveNote>& notes);
  void UpdateHealth(const std::string& path, const PathHealth& health,
                    std::vector<DriveNote>& notes);
  void Compare(const std::string& path, const DriveHealth& drive, std::vector<DriveNote>& notes);

  const std::shared_ptr<MetricsTable> table_;
  const IoBudget budget_;
  std::map<std::pair<std::string, MetricLabels>, double> totals_;  // as they were last exported
  std::set<std::pair<std::string, MetricLabels>> known_;           // gauges that have been set
  std::set<std::string> known_paths_;                              // introduced in the log
  std::map<std::string, Said> said_;                               // by path and drive
  DriveWatch watch_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DRIVE_METRICS_H_
