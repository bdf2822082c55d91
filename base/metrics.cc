#include "base/metrics.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace zeroshard {

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)),
      counts_(std::make_unique<std::atomic<uint64_t>[]>(bounds_.size() + 1)) {
  ZS_CHECK(std::is_sorted(bounds_.begin(), bounds_.end()), "histogram bounds must ascend");
}

void Histogram::Observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[bucket].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

std::vector<uint64_t> Histogram::counts() const {
  std::vector<uint64_t> counts(bounds_.size() + 1);
  for (size_t i = 0; i < counts.size(); ++i) {
    counts[i] = counts_[i].load(std::memory_order_relaxed);
  }
  return counts;
}

std::vector<double> LatencyBounds() {
  return {10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3,
          50e-3, 0.1,   0.25,  0.5,    1,      2.5,    5,    10,     25,   50,    100};
}

MetricSeries* MetricsTable::FindOrAdd(std::string_view name, std::string_view help, MetricType type,
                                      const MetricLabels& labels) {
  auto family = families_.find(name);
  if (family == families_.end()) {
    family = families_.emplace(std::string(name), Family{std::string(help), type, {}}).first;
  }
  ZS_CHECK(family->second.type == type, "metric " + std::string(name) + " has two types");
  const auto found = family->second.series.find(labels);
  if (found != family->second.series.end()) return &found->second;
  if (series_count_ >= max_series_) {
    ++dropped_;
    return nullptr;
  }
  ++series_count_;
  MetricSeries& series = family->second.series[labels];
  series.labels = labels;
  return &series;
}

std::shared_ptr<Counter> MetricsTable::GetCounter(std::string_view name, std::string_view help,
                                                  const MetricLabels& labels) {
  absl::MutexLock lock(&mu_);
  MetricSeries* series = FindOrAdd(name, help, MetricType::kCounter, labels);
  if (series == nullptr) return std::make_shared<Counter>();
  if (!series->counter) series->counter = std::make_shared<Counter>();
  return series->counter;
}

std::shared_ptr<Gauge> MetricsTable::GetGauge(std::string_view name, std::string_view help,
                                              const MetricLabels& labels) {
  absl::MutexLock lock(&mu_);
  MetricSeries* series = FindOrAdd(name, help, MetricType::kGauge, labels);
  if (series == nullptr) return std::make_shared<Gauge>();
  if (!series->gauge) series->gauge = std::make_shared<Gauge>();
  return series->gauge;
}

std::shared_ptr<Histogram> MetricsTable::GetHistogram(std::string_view name, std::string_view help,
                                                      const MetricLabels& labels,
                                                      const std::vector<double>& bounds) {
  absl::MutexLock lock(&mu_);
  MetricSeries* series = FindOrAdd(name, help, MetricType::kHistogram, labels);
  if (series == nullptr) return std::make_shared<Histogram>(bounds);
  if (!series->histogram) series->histogram = std::make_shared<Histogram>(bounds);
  return series->histogram;
}

void MetricsTable::RemoveSeries(std::string_view label, std::string_view value) {
  const std::string key(label);
  absl::MutexLock lock(&mu_);
  for (auto& [name, family] : families_) {
    series_count_ -= std::erase_if(family.series, [&](const auto& entry) {
      const auto found = entry.first.find(key);
      return found != entry.first.end() && found->second == value;
    });
  }
}

std::vector<MetricFamily> MetricsTable::Families() const {
  absl::MutexLock lock(&mu_);
  std::vector<MetricFamily> families;
  for (const auto& [name, family] : families_) {
    MetricFamily exported = {name, family.help, family.type, {}};
    for (const auto& [labels, series] : family.series) exported.series.push_back(series);
    families.push_back(std::move(exported));
  }
  if (dropped_ > 0) {
    auto counter = std::make_shared<Counter>();
    counter->Increment(static_cast<double>(dropped_));
    families.push_back({"zeroshard_metrics_dropped_series_total",
                        "Series that were not exported because the table is full.",
                        MetricType::kCounter,
                        {{{}, std::move(counter), nullptr, nullptr}}});
  }
  return families;
}

}  // namespace zeroshard
