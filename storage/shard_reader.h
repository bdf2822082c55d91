// ShardReader: one verified shard file of a checkpoint.
//
// Open reads and verifies header, footer and index; Read verifies the whole record before it
// returns. Immutable after Open: Read may be called from any thread. Format page:
// docs/checkpoint.md.
#ifndef ZEROSHARD_STORAGE_SHARD_READER_H_
#define ZEROSHARD_STORAGE_SHARD_READER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "storage/shard_format.h"

namespace zeroshard {

class ShardReader {
 public:
  // Opens the shard of `worker` beneath `dir_fd`. DataLoss naming file and offset when it is
  // missing, damaged, of another worker or of another checkpoint than `identity`.
  static absl::StatusOr<ShardReader> Open(int dir_fd, uint32_t worker,
                                          const CheckpointIdentity& identity);

  std::span<const ShardRecord> records() const { return records_; }
  // Length of the file, and the checksum of its footer, which vouches for all of it.
  uint64_t bytes() const { return bytes_; }
  uint64_t checksum() const { return checksum_; }
  const std::string& path() const { return path_; }

  // Reads a record whole; out.size() == record.bytes. On DataLoss `out` holds garbage.
  absl::Status Read(const ShardRecord& record, std::span<std::byte> out) const;

 private:
  ShardReader() = default;

  UniqueFd fd_;
  std::string path_;
  uint64_t bytes_ = 0;
  uint64_t checksum_ = 0;
  std::vector<ShardRecord> records_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_SHARD_READER_H_
