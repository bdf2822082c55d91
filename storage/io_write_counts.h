// IoWriteCounts: the bytes written today by device, in a small file, so that a daemon that is
// started again goes on with the day's count of the write budget. Format: docs/io_budget.md.
//
// One thread of the server. The directory's descriptor must outlive the object.
#ifndef ZEROSHARD_STORAGE_IO_WRITE_COUNTS_H_
#define ZEROSHARD_STORAGE_IO_WRITE_COUNTS_H_

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/io_budget.h"

namespace zeroshard {

class IoWriteCounts {
 public:
  static constexpr char kFileName[] = "nvme-writes";

  // Nothing counted before.
  explicit IoWriteCounts(int dir_fd) : dir_fd_(dir_fd) {}
  // With the counts of the file, if there is one. DataLoss when it is damaged: a count that is
  // begun anew is all that is lost.
  static absl::StatusOr<IoWriteCounts> Load(int dir_fd);

  // Adds what was counted before for the device's path; once for each path. To be called after
  // AddDevice.
  void Restore(const IoBudget& budget, uint32_t device);
  // Writes the file when something has changed; it is replaced as a whole.
  absl::Status Save(const IoBudget& budget);

 private:
  const int dir_fd_;
  std::map<std::string, IoDay> earlier_;  // by path, not restored yet
  std::string saved_;                     // the file's text
};

// The text of the file, and back. DataLoss naming what is wrong.
std::string FormatWriteCounts(const std::map<std::string, IoDay>& counts);
absl::StatusOr<std::map<std::string, IoDay>> ParseWriteCounts(std::string_view text);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_WRITE_COUNTS_H_
