#include "storage/shard_reader.h"

#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/status.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

using shard_format::Footer;
using shard_format::Header;

absl::StatusOr<std::string> ReadText(int fd, uint64_t offset, uint64_t bytes,
                                     const std::string& path) {
  std::string text(bytes, '\0');
  ZS_RETURN_IF_ERROR(ReadAllAt(fd, std::as_writable_bytes(std::span<char>(text)), offset, path));
  return text;
}

absl::Status CheckHeader(const Header& header, uint32_t worker, const CheckpointIdentity& identity,
                         const std::string& path) {
  if (header.identity.job_id != identity.job_id) {
    return CorruptAt(path, 0, "the shard is of another job");
  }
  if (header.identity.layout_fingerprint != identity.layout_fingerprint) {
    return CorruptAt(path, 0, "the shard is of another layout");
  }
  if (header.identity.step != identity.step) {
    return CorruptAt(path, 0,
                     absl::StrCat("the shard is of step ", header.identity.step, ", step ",
                                  identity.step, " was expected"));
  }
  if (header.worker != worker) {
    return CorruptAt(path, 0, absl::StrCat("the shard is of worker ", header.worker));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardReader> ShardReader::Open(int dir_fd, uint32_t worker,
                                              const CheckpointIdentity& identity) {
  const std::string name = shard_format::ShardFileName(worker);
  absl::StatusOr<UniqueFd> fd = OpenBeneath(dir_fd, name, O_RDONLY);
  if (absl::IsNotFound(fd.status())) {
    return CorruptAt(absl::StrCat(DescribeFd(dir_fd), "/", name), 0, "the shard is missing");
  }
  ZS_RETURN_IF_ERROR(fd.status());
  ShardReader reader;
  reader.fd_ = *std::move(fd);
  reader.path_ = DescribeFd(reader.fd_.get());
  ZS_ASSIGN_OR_RETURN(reader.bytes_, RegularFileSize(reader.fd_.get(), reader.path_));
  const std::string& path = reader.path_;
  if (reader.bytes_ < shard_format::kHeaderBytes + shard_format::kFooterBytes) {
    return CorruptAt(path, reader.bytes_, "the shard is cut off");
  }
  ZS_ASSIGN_OR_RETURN(const std::string head,
                      ReadText(reader.fd_.get(), 0, shard_format::kHeaderBytes, path));
  ZS_ASSIGN_OR_RETURN(const Header header, shard_format::DecodeHeader(head, path));
  ZS_RETURN_IF_ERROR(CheckHeader(header, worker, identity, path));
  const uint64_t footer_offset = reader.bytes_ - shard_format::kFooterBytes;
  ZS_ASSIGN_OR_RETURN(const std::string tail,
                      ReadText(reader.fd_.get(), footer_offset, shard_format::kFooterBytes, path));
  ZS_ASSIGN_OR_RETURN(const Footer footer, shard_format::DecodeFooter(tail, reader.bytes_, path));
  if (footer.header_checksum != Xxh3_64(head)) {
    return CorruptAt(path, footer_offset, "the footer belongs to another header");
  }
  ZS_ASSIGN_OR_RETURN(const std::string index, ReadText(reader.fd_.get(), footer.index_offset,
                                                        footer_offset - footer.index_offset, path));
  if (footer.index_checksum != Xxh3_64(index)) {
    return CorruptAt(path, footer.index_offset, "the checksum of the index is wrong");
  }
  ZS_ASSIGN_OR_RETURN(reader.records_, shard_format::DecodeIndex(index, footer.index_offset, path));
  reader.checksum_ = Xxh3_64(tail);
  return reader;
}

absl::Status ShardReader::Read(const ShardRecord& record, std::span<std::byte> out) const {
  ZS_RETURN_IF_ERROR(ReadAllAt(fd_.get(), out, record.offset, path_));
  if (Xxh3_64(out) == record.checksum) return absl::OkStatus();
  return CorruptAt(
      path_, record.offset,
      absl::StrCat("the checksum of ", record.kind, " of unit ", record.unit, ", grains [",
                   record.grains.begin, ", ", record.grains.end, "), is wrong"));
}

}  // namespace zeroshard
