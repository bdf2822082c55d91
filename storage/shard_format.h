// The bytes of a checkpoint's shard file and commit marker: encoded, decoded, checked. Pure.
// Decoders return what is wrong as a DataLoss with the file's name. Format page:
// docs/checkpoint.md.
#ifndef ZEROSHARD_STORAGE_SHARD_FORMAT_H_
#define ZEROSHARD_STORAGE_SHARD_FORMAT_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/layout.h"
#include "storage/record_type.h"

namespace zeroshard {

inline constexpr uint64_t kShardAlignment = 4096;
// Grains of one record at most: 4 MiB of fp32.
inline constexpr uint64_t kMaxRecordGrains = 4096;
inline constexpr size_t kMaxKindLength = 31;

// Kinds that are not an optimizer's own.
inline constexpr std::string_view kKindParameter = "parameter";
inline constexpr std::string_view kKindMaster = "master";

// What every shard of one checkpoint agrees on.
struct CheckpointIdentity {
  uint64_t job_id = 0;
  uint64_t layout_fingerprint = 0;
  uint64_t step = 0;
  friend bool operator==(const CheckpointIdentity&, const CheckpointIdentity&) = default;
};

// A run of grains of one kind of state of one unit, in one place of a file.
struct ShardRecord {
  uint32_t unit = 0;
  RecordType type = DType::kFloat32;
  std::string kind;
  GrainRange grains;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

namespace shard_format {

inline constexpr uint64_t kHeaderBytes = 4096;
inline constexpr uint64_t kEntryBytes = 80;
inline constexpr uint64_t kFooterBytes = 64;
inline constexpr uint64_t kCommitBytes = 40;

// "shard-3.zsc".
std::string ShardFileName(uint32_t worker);

// InvalidArgument unless `kind` is [a-z0-9_]{1,31}.
absl::Status ValidateKind(std::string_view kind);

struct Header {
  uint32_t worker = 0;
  CheckpointIdentity identity;
};
std::string EncodeHeader(const Header& header);
absl::StatusOr<Header> DecodeHeader(std::string_view bytes, const std::string& path);

std::string EncodeIndex(std::span<const ShardRecord> records);
// `offset` is that of the index; all records must lie between header and index.
absl::StatusOr<std::vector<ShardRecord>> DecodeIndex(std::string_view bytes, uint64_t offset,
                                                     const std::string& path);

struct Footer {
  uint64_t index_offset = 0;
  uint64_t entries = 0;
  uint64_t index_checksum = 0;
  uint64_t header_checksum = 0;
};
std::string EncodeFooter(const Footer& footer);
// Checks that header, index and footer fill a file of `file_bytes`.
absl::StatusOr<Footer> DecodeFooter(std::string_view bytes, uint64_t file_bytes,
                                    const std::string& path);

struct Commit {
  uint64_t manifest_bytes = 0;
  uint64_t manifest_checksum = 0;
};
std::string EncodeCommit(const Commit& commit);
absl::StatusOr<Commit> DecodeCommit(std::string_view bytes, const std::string& path);

}  // namespace shard_format
}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_SHARD_FORMAT_H_
