// How a report is shown: as text with a table, and as JSON.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/nvme_bench.h"
#include "client/cli/text_table.h"

namespace zeroshard {
namespace {

using Json = nlohmann::ordered_json;

const char* NameOfAccess(NvmeAccess access) {
  switch (access) {
    case NvmeAccess::kRead:
      return "read";
    case NvmeAccess::kWrite:
      return "write";
    case NvmeAccess::kBoth:
      return "read+write";
  }
  return "unknown";
}

Json AioOf(const NvmeBenchRow& row) {
  return {{"block_size", row.block_bytes},
          {"queue_depth", row.depth},
          {"intra_op_parallelism", 1},
          {"single_submit", false},
          {"overlap_events", true}};
}

}  // namespace

std::string NvmeBenchText(const NvmeBenchReport& report) {
  std::string text = absl::StrFormat("%s: %s, %s, %s\n%s\n\n", report.path, report.file_system,
                                     report.direct ? "O_DIRECT" : "buffered",
                                     ReadableBytes(report.file_bytes) + " file", report.reason);
  TextTable table({"access", "block", "depth", "gb/s", "p50 ms", "p99 ms"});
  for (const NvmeBenchRow& row : report.rows) {
    table.Add({NameOfAccess(row.access), ReadableBytes(row.block_bytes), absl::StrCat(row.depth),
               absl::StrFormat("%.2f", row.gigabytes_per_second),
               absl::StrFormat("%.2f", row.p50_microseconds / 1000),
               absl::StrFormat("%.2f", row.p99_microseconds / 1000)});
  }
  text += table.Text();
  for (const std::string& warning : report.warnings) text += "\nwarning: " + warning + "\n";
  if (const NvmeBenchRow* best = BestRow(report.rows); best != nullptr) {
    absl::StrAppendFormat(&text,
                          "\nFor a step, which reads and writes at once: %.2f GB/s with %s of "
                          "staging memory. In ds_config.json:\n\n\"aio\": %s\n",
                          best->gigabytes_per_second,
                          ReadableBytes(best->block_bytes * best->depth), AioOf(*best).dump());
  }
  return text;
}

std::string NvmeBenchJson(const NvmeBenchReport& report) {
  Json rows = Json::array();
  for (const NvmeBenchRow& row : report.rows) {
    rows.push_back({{"access", NameOfAccess(row.access)},
                    {"block_size", row.block_bytes},
                    {"queue_depth", row.depth},
                    {"transfers", row.transfers},
                    {"gb_per_s", row.gigabytes_per_second},
                    {"p50_us", row.p50_microseconds},
                    {"p99_us", row.p99_microseconds}});
  }
  const NvmeBenchRow* best = BestRow(report.rows);
  const Json json = {{"path", report.path},
                     {"file_system", report.file_system},
                     {"backend", report.backend},
                     {"reason", report.reason},
                     {"direct", report.direct},
                     {"file_bytes", report.file_bytes},
                     {"rows", rows},
                     {"aio", best == nullptr ? Json() : AioOf(*best)},
                     {"warnings", report.warnings}};
  return json.dump(2) + "\n";
}

}  // namespace zeroshard
