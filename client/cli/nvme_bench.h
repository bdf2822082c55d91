// What a drive does for the nvme tier: `zeroshard bench nvme PATH`.
//
// Real transfers with the same IoQueue that the tier uses, on a file that lies in PATH, was written
// beforehand (unwritten extents are slower than any drive), and is gone afterwards, also when the
// process is killed. One thread; nothing is kept.
#ifndef ZEROSHARD_CLIENT_CLI_NVME_BENCH_H_
#define ZEROSHARD_CLIENT_CLI_NVME_BENCH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "storage/file_system_kind.h"
#include "storage/io_backend.h"

namespace zeroshard {

struct NvmeBenchOptions {
  std::string path;  // a directory
  IoBackend backend = IoBackend::kAuto;
  bool allow_network_path = false;
  uint64_t file_bytes = uint64_t{1} << 30;  // at most; a quarter of the free space is the bound
  absl::Duration time = absl::Seconds(10);  // in all, about
};

// Sequential reads; sequential writes; both in turn, in halves of the file: a step of the tier.
enum class NvmeAccess : uint8_t { kRead, kWrite, kBoth };

struct NvmeBenchRow {
  NvmeAccess access = NvmeAccess::kRead;
  size_t block_bytes = 0;
  size_t depth = 0;
  uint64_t transfers = 0;
  double gigabytes_per_second = 0;  // 10^9
  double p50_microseconds = 0;      // from Submit to its report
  double p99_microseconds = 0;
};

struct NvmeBenchReport {
  std::string path;
  std::string file_system;
  std::string backend;  // "uring" or "threads"
  std::string reason;   // why that one
  bool direct = false;
  uint64_t file_bytes = 0;
  std::vector<NvmeBenchRow> rows;
  std::vector<std::string> warnings;
};

// FailedPrecondition for a network file system unless allowed; ResourceExhausted when there is no
// room for a useful file; else the first error of the drive.
absl::StatusOr<NvmeBenchReport> RunNvmeBench(const NvmeBenchOptions& options);

// Warnings about where the path lies; FailedPrecondition for a network unless it is allowed.
absl::StatusOr<std::vector<std::string>> CheckPlace(const std::string& path,
                                                    const FileSystemKind& kind,
                                                    bool allow_network_path);

// The row to take the `aio` settings from: among those of kBoth within 5 % of the fastest, the one
// that needs the least staging memory. Null without such rows.
const NvmeBenchRow* BestRow(const std::vector<NvmeBenchRow>& rows);

// A table, the warnings, and the block for ds_config.json.
std::string NvmeBenchText(const NvmeBenchReport& report);
std::string NvmeBenchJson(const NvmeBenchReport& report);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_CLI_NVME_BENCH_H_
