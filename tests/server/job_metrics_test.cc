// The table of docs/metrics.md is the table of the code.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "server/job_metrics.h"

namespace zeroshard {
namespace {

// The rows "| `name` | type | labels | meaning |".
std::map<std::string, std::vector<std::string>> ReadRows(const std::string& path) {
  std::map<std::string, std::vector<std::string>> rows;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::vector<std::string> cells;
    for (const auto& cell : absl::StrSplit(line, '|')) {
      cells.emplace_back(absl::StripAsciiWhitespace(cell));
    }
    if (cells.size() != 6 || cells[1].size() < 3 || cells[1][0] != '`') continue;
    rows[cells[1].substr(1, cells[1].size() - 2)] = {cells[2], cells[3], cells[4]};
  }
  return rows;
}

const char* TypeName(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return "counter";
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

TEST(MetricsDoc, NamesEveryFamilyWithItsTypeLabelsAndMeaning) {
  auto rows = ReadRows("docs/metrics.md");
  for (const MetricDescription& metric : AllMetrics()) {
    ASSERT_EQ(rows.count(metric.name), 1u) << metric.name;
    const std::vector<std::string>& row = rows[metric.name];
    EXPECT_EQ(row[0], TypeName(metric.type)) << metric.name;
    EXPECT_EQ(row[1], metric.labels) << metric.name;
    EXPECT_EQ(row[2], metric.help) << metric.name;
    rows.erase(metric.name);
  }
  EXPECT_TRUE(rows.empty()) << "documented but not there: " << rows.begin()->first;
}

internal::v1::Stats SomeStats(uint64_t scale) {
  internal::v1::Stats stats;
  stats.set_step(scale);
  stats.set_updates(scale);
  stats.set_gather_elements(100 * scale);
  stats.set_loss_scale(1024);
  stats.set_pinned_bytes(8192 * scale);
  stats.set_unpinned_bytes(4096);
  stats.add_nvme_paths();
  stats.set_nvme_damaged_images(3 * scale);
  stats.set_nvme_rebuilt_images(2 * scale);
  stats.set_gpu_free_bytes(1);
  stats.set_gpu_damaged_mirrors(scale);
  for (int i = 0; i < 4; ++i) stats.add_gather_us(i == 3 ? scale : 0);
  return stats;
}

double CounterValue(const MetricsTable& table, const std::string& family,
                    const MetricLabels& labels) {
  for (const MetricFamily& one : table.Families()) {
    if (one.name != family) continue;
    for (const MetricSeries& series : one.series) {
      if (series.labels == labels && series.counter) return series.counter->value();
      if (series.labels == labels && series.gauge) return series.gauge->value();
      if (series.labels == labels && series.histogram) return series.histogram->sum();
    }
  }
  return -1;
}

TEST(JobMetrics, CountersGrowByTheDifferenceOfWhatAWorkerReports) {
  auto table = std::make_shared<MetricsTable>();
  JobMetrics metrics(table);
  const MetricLabels gather = {{"job", "gpt"}, {"kind", "gather"}, {"worker", "0"}};
  metrics.AddStats("gpt", 0, internal::v1::Stats(), SomeStats(2));
  metrics.AddStats("gpt", 0, SomeStats(2), SomeStats(5));
  EXPECT_EQ(CounterValue(*table, "zeroshard_collective_elements_total", gather), 500);
  EXPECT_EQ(CounterValue(*table, "zeroshard_step", {{"job", "gpt"}}), 5);
  EXPECT_EQ(CounterValue(*table, "zeroshard_optimizer_updates_total", {{"job", "gpt"}}), 5);
  const MetricLabels of_worker = {{"job", "gpt"}, {"worker", "0"}};
  EXPECT_EQ(CounterValue(*table, "zeroshard_worker_pinned_bytes", of_worker), 5 * 8192);
  EXPECT_EQ(CounterValue(*table, "zeroshard_worker_unpinned_bytes", of_worker), 4096);
  EXPECT_EQ(CounterValue(*table, "zeroshard_tier_damaged_images_total", of_worker), 15);
  EXPECT_EQ(CounterValue(*table, "zeroshard_tier_rebuilt_images_total", of_worker), 10);
  EXPECT_EQ(CounterValue(*table, "zeroshard_gpu_damaged_mirrors_total", of_worker), 5);
  EXPECT_NEAR(CounterValue(*table, "zeroshard_gather_seconds", {{"job", "gpt"}, {"worker", "0"}}),
              5 * 0.75 * 8e-6, 1e-9);
  metrics.Remove("gpt");
  EXPECT_EQ(CounterValue(*table, "zeroshard_collective_elements_total", gather), -1);
}

}  // namespace
}  // namespace zeroshard
