#include "client/cli/nvme_bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/conformance/small_file_system.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

NvmeBenchRow Row(NvmeAccess access, size_t block, size_t depth, double speed) {
  return {.access = access, .block_bytes = block, .depth = depth, .gigabytes_per_second = speed};
}

TEST(NvmeBench, TheBestRowIsTheSmallestOfTheFastest) {
  const std::vector<NvmeBenchRow> rows = {
      Row(NvmeAccess::kRead, 1, 1, 99),          Row(NvmeAccess::kBoth, 1 << 18, 2, 0.5),
      Row(NvmeAccess::kBoth, 1 << 18, 8, 0.94),  Row(NvmeAccess::kBoth, 1 << 20, 8, 0.96),
      Row(NvmeAccess::kBoth, 1 << 18, 32, 0.97), Row(NvmeAccess::kBoth, 1 << 22, 32, 1.0)};
  ASSERT_NE(BestRow(rows), nullptr);
  EXPECT_EQ(BestRow(rows), &rows[4]) << "of equal memory the faster one";
  EXPECT_EQ(BestRow({rows[0]}), nullptr);
  EXPECT_EQ(BestRow({}), nullptr);
}

TEST(NvmeBench, ANetworkIsRefusedUnlessAllowed) {
  const FileSystemKind nfs = {FileSystemPlace::kNetwork, "nfs"};
  const absl::Status refused = CheckPlace("/data", nfs, false).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("/data lies on nfs, a network file system: the nvme tier needs a local"));
  EXPECT_THAT(CheckPlace("/data", nfs, true)->at(0), HasSubstr("others share it"));
  EXPECT_TRUE(CheckPlace("/data", {FileSystemPlace::kLocal, "xfs"}, false)->empty());
}

TEST(NvmeBench, MeasuresAndLeavesNothingBehind) {
  const TempDir directory;
  for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads}) {
    const absl::StatusOr<NvmeBenchReport> report = RunNvmeBench({.path = directory.path(),
                                                                 .backend = backend,
                                                                 .file_bytes = 64 << 20,
                                                                 .time = absl::Milliseconds(400)});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(directory.Count(), 0u);
    EXPECT_GE(report->file_bytes, 32u << 20);
    EXPECT_GE(report->rows.size(), 9u);
    for (const NvmeBenchRow& row : report->rows) {
      EXPECT_GE(row.transfers, 1u);
      EXPECT_GT(row.gigabytes_per_second, 0);
      EXPECT_GT(row.p50_microseconds, 0);
      EXPECT_GE(row.p99_microseconds, row.p50_microseconds);
      EXPECT_LE(2 * row.block_bytes * row.depth, report->file_bytes);
    }
    if (backend == IoBackend::kThreads) {
      EXPECT_EQ(report->backend, "threads");
    }
  }
}

TEST(NvmeBench, WarnsWhereODirectIsRefused) {
  const int result = RunOnSmallFileSystem(
      [](const std::string& directory) {
        const absl::StatusOr<NvmeBenchReport> report = RunNvmeBench(
            {.path = directory, .file_bytes = 32 << 20, .time = absl::Milliseconds(200)});
        if (!report.ok() || report->direct || report->warnings.size() < 2) return false;
        const std::string text = NvmeBenchText(*report);
        return text.find("refuses O_DIRECT") != std::string::npos &&
               text.find("figures of memory, not of a drive") != std::string::npos;
      },
      "ramfs");
  if (result == kNotAllowed) GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(result, 0);
}

TEST(NvmeBench, SaysWhatIsWrongWithThePath) {
  EXPECT_TRUE(absl::IsNotFound(RunNvmeBench({.path = "/no/such/path"}).status()));
  const TempDir directory;
  EXPECT_TRUE(absl::IsResourceExhausted(
      RunNvmeBench({.path = directory.path(), .file_bytes = 1 << 20}).status()));
}

TEST(NvmeBench, ShowsTheSettingsToUse) {
  NvmeBenchReport report;
  report.path = "/drive";
  report.file_system = "xfs";
  report.backend = "uring";
  report.direct = true;
  report.file_bytes = 1 << 30;
  report.rows = {Row(NvmeAccess::kRead, 1 << 20, 8, 6.5), Row(NvmeAccess::kBoth, 1 << 20, 8, 3.25)};
  report.warnings = {"hot"};
  const std::string text = NvmeBenchText(report);
  EXPECT_THAT(text, HasSubstr("/drive: xfs, O_DIRECT, 1.00 GiB file"));
  EXPECT_THAT(text, HasSubstr("warning: hot"));
  EXPECT_THAT(text, HasSubstr("3.25 GB/s with 8.00 MiB of staging memory"));
  EXPECT_THAT(text, HasSubstr("\"aio\": {\"block_size\":1048576,\"queue_depth\":8,"));
  const nlohmann::json json = nlohmann::json::parse(NvmeBenchJson(report));
  EXPECT_EQ(json["aio"]["queue_depth"], 8);
  EXPECT_EQ(json["rows"][0]["access"], "read");
  EXPECT_EQ(json["rows"][0]["gb_per_s"], 6.5);
  EXPECT_EQ(json["warnings"][0], "hot");
  report.rows.pop_back();
  EXPECT_TRUE(nlohmann::json::parse(NvmeBenchJson(report))["aio"].is_null());
}

}  // namespace
}  // namespace zeroshard
