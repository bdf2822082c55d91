#include "storage/shard_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/status.h"
#include "storage/bytes.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"

namespace zeroshard {

absl::StatusOr<ShardWriter> ShardWriter::Create(int dir_fd, uint32_t worker,
                                                const CheckpointIdentity& identity,
                                                uint64_t expected_bytes) {
  ShardWriter writer;
  const std::string name = shard_format::ShardFileName(worker);
  ZS_ASSIGN_OR_RETURN(writer.fd_, OpenBeneath(dir_fd, name, O_RDWR | O_CREAT | O_EXCL));
  writer.path_ = DescribeFd(writer.fd_.get());
  ZS_RETURN_IF_ERROR(
      ReserveSpace(writer.fd_.get(), shard_format::kHeaderBytes + expected_bytes, writer.path_));
  const std::string header = shard_format::EncodeHeader({worker, identity});
  ZS_RETURN_IF_ERROR(WriteAllAt(writer.fd_.get(), AsBytes(header), 0, writer.path_));
  writer.header_checksum_ = Xxh3_64(header);
  writer.end_ = shard_format::kHeaderBytes;
  return writer;
}

absl::Status ShardWriter::Append(uint32_t unit, GrainRange grains, std::string_view kind,
                                 RecordType type, std::span<const std::byte> data) {
  ZS_RETURN_IF_ERROR(status_);
  ZS_RETURN_IF_ERROR(shard_format::ValidateKind(kind));
  const bool ordered = grains.begin <= grains.end && grains.end <= kMaxElements / kGrainElements;
  if (!ordered || data.size() != grains.size() * type.grain_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("grains [", grains.begin, ", ", grains.end,
                                                   ") of unit ", unit, " with ", data.size(),
                                                   " bytes"));
  }
  for (uint64_t begin = grains.begin; begin < grains.end; begin += kMaxRecordGrains) {
    ShardRecord record;
    record.unit = unit;
    record.type = type;
    record.kind = kind;
    record.grains = {begin, std::min(begin + kMaxRecordGrains, grains.end)};
    record.bytes = record.grains.size() * type.grain_bytes();
    status_ = AppendRecord(std::move(record), data.first(record.bytes));
    ZS_RETURN_IF_ERROR(status_);
    data = data.subspan(records_.back().bytes);
  }
  return absl::OkStatus();
}

absl::Status ShardWriter::AppendRecord(ShardRecord record, std::span<const std::byte> data) {
  record.offset = RoundUpTo(end_, kShardAlignment);
  record.checksum = Xxh3_64(data);
  ZS_RETURN_IF_ERROR(WriteAllAt(fd_.get(), data, record.offset, path_));
  end_ = record.offset + record.bytes;
  records_.push_back(std::move(record));
  return absl::OkStatus();
}

absl::Status ShardWriter::WriteEnd() {
  const std::string index = shard_format::EncodeIndex(records_);
  const uint64_t index_offset = RoundUpTo(end_, kShardAlignment);
  ZS_RETURN_IF_ERROR(WriteAllAt(fd_.get(), AsBytes(index), index_offset, path_));
  const std::string footer =
      shard_format::EncodeFooter({index_offset, records_.size(), Xxh3_64(index), header_checksum_});
  const uint64_t footer_offset = index_offset + index.size();
  ZS_RETURN_IF_ERROR(WriteAllAt(fd_.get(), AsBytes(footer), footer_offset, path_));
  end_ = footer_offset + footer.size();
  // Gives back what was reserved and not used.
  if (::ftruncate(fd_.get(), static_cast<off_t>(end_)) != 0) {
    return ErrnoErrorAt(errno, "truncate", path_, end_);
  }
  ZS_RETURN_IF_ERROR(SyncFile(fd_.get(), path_));
  return std::move(fd_).Close();
}

absl::StatusOr<uint64_t> ShardWriter::Finish() && {
  ZS_RETURN_IF_ERROR(status_);
  ZS_RETURN_IF_ERROR(WriteEnd());
  return end_;
}

}  // namespace zeroshard
