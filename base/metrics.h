// The table of metrics of a process. Counting is one atomic operation; nothing here does I/O.
//
// A series is a family name with label values. Handles are shared: a handle stays usable after its
// series was removed from the table, it only is no longer exported. Every family has one type and
// one help text, fixed by its first use; asking for it with another type is a bug and aborts.
// All methods of all classes may be called from any thread. base/metrics_server.h exports a table.

#ifndef ZEROSHARD_BASE_METRICS_H_
#define ZEROSHARD_BASE_METRICS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace zeroshard {

// Label names and values, sorted by name.
using MetricLabels = std::map<std::string, std::string>;

// Only ever grows.
class Counter {
 public:
  void Increment(double amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

class Gauge {
 public:
  void Set(double value) { value_.store(value, std::memory_order_relaxed); }
  void Add(double amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

// Counts of observations at or under each bound (and above the last), and their sum.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);

  void Observe(double value);

  const std::vector<double>& bounds() const { return bounds_; }
  double sum() const { return sum_.load(std::memory_order_relaxed); }

  // One count per bound and one for what is above the last; not cumulative.
  std::vector<uint64_t> counts() const;

 private:
  const std::vector<double> bounds_;  // ascending
  std::unique_ptr<std::atomic<uint64_t>[]> counts_;
  std::atomic<double> sum_{0};
};

// 10 microseconds to 100 seconds, in steps of 1, 2.5, 5: for latencies in seconds.
std::vector<double> LatencyBounds();

enum class MetricType { kCounter, kGauge, kHistogram };

// One exported series; exactly one of the pointers is set, by its family's type.
struct MetricSeries {
  MetricLabels labels;
  std::shared_ptr<Counter> counter;
  std::shared_ptr<Gauge> gauge;
  std::shared_ptr<Histogram> histogram;
};

struct MetricFamily {
  std::string name;
  std::string help;
  MetricType type = MetricType::kCounter;
  std::vector<MetricSeries> series;
};

class MetricsTable {
 public:
  // Past `max_series` a new series is usable but not exported, and is counted in
  // zeroshard_metrics_dropped_series_total: labels chosen by clients cannot exhaust memory.
  explicit MetricsTable(size_t max_series = 10000) : max_series_(max_series) {}

  // The series' handle, made at first use. `help` of the first use is kept.
  std::shared_ptr<Counter> GetCounter(std::string_view name, std::string_view help,
                                      const MetricLabels& labels = {});
  std::shared_ptr<Gauge> GetGauge(std::string_view name, std::string_view help,
                                  const MetricLabels& labels = {});
  std::shared_ptr<Histogram> GetHistogram(std::string_view name, std::string_view help,
                                          const MetricLabels& labels = {},
                                          const std::vector<double>& bounds = LatencyBounds());

  // Drops every series that has this label and value, in all families: a job has ended.
  void RemoveSeries(std::string_view label, std::string_view value);

  // All families sorted by name, with their series sorted by labels.
  std::vector<MetricFamily> Families() const;

 private:
  struct Family {
    std::string help;
    MetricType type;
    std::map<MetricLabels, MetricSeries> series;
  };

  // The series, or null when the table is full and has it not yet.
  MetricSeries* FindOrAdd(std::string_view name, std::string_view help, MetricType type,
                          const MetricLabels& labels) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t max_series_;
  mutable absl::Mutex mu_;
  std::map<std::string, Family, std::less<>> families_ ABSL_GUARDED_BY(mu_);
  size_t series_count_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_METRICS_H_
