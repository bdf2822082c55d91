// ShardWriter: writes one worker's file of a checkpoint, streaming.
//
// Owned by the worker during a save, one thread at a time. Nothing is kept in memory but the index
// (80 bytes for each 4 MiB). The file counts only once Finish returned OK and the checkpoint was
// committed; the first error sticks. Fault points: those of storage/file_io.h. Format page:
// docs/checkpoint.md.
#ifndef ZEROSHARD_STORAGE_SHARD_WRITER_H_
#define ZEROSHARD_STORAGE_SHARD_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "storage/layout.h"
#include "storage/shard_format.h"

namespace zeroshard {

class ShardWriter {
 public:
  // Makes `shard-<worker>.zsc` beneath `dir_fd` (AlreadyExists when it is there) and reserves
  // `expected_bytes` of data on the disk: ResourceExhausted now rather than halfway.
  static absl::StatusOr<ShardWriter> Create(int dir_fd, uint32_t worker,
                                            const CheckpointIdentity& identity,
                                            uint64_t expected_bytes);

  // Writes the elements of `grains` of one kind of state of a unit, in records of at most
  // kMaxRecordGrains. An empty range writes nothing. InvalidArgument when the size of `data` is not
  // grains.size() * type.grain_bytes(), or for a kind that is not one.
  absl::Status Append(uint32_t unit, GrainRange grains, std::string_view kind, RecordType type,
                      std::span<const std::byte> data);

  // Writes the index, syncs, closes. Returns the length of the file.
  absl::StatusOr<uint64_t> Finish() &&;

 private:
  ShardWriter() = default;
  absl::Status AppendRecord(ShardRecord record, std::span<const std::byte> data);
  absl::Status WriteEnd();

  UniqueFd fd_;
  std::string path_;  // for messages
  uint64_t header_checksum_ = 0;
  uint64_t end_ = 0;
  std::vector<ShardRecord> records_;
  absl::Status status_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_SHARD_WRITER_H_
