#include "storage/shard_format.h"

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/bytes.h"
#include "storage/file_io.h"

namespace zeroshard::shard_format {
namespace {

constexpr std::string_view kHeaderMagic = "ZSSHARD1";
constexpr std::string_view kFooterMagic = "ZSINDEX1";
constexpr std::string_view kCommitMagic = "ZSCOMMIT";
constexpr uint32_t kVersion = 1;
constexpr size_t kChecksum = 8;
constexpr size_t kKindField = 32;

// Pads with zeros and ends with the checksum of all before it.
std::string Sealed(std::string bytes, uint64_t size) {
  bytes.resize(size - kChecksum, '\0');
  AppendInteger(bytes, Xxh3_64(bytes));
  return bytes;
}

// Checks size, magic and checksum of what Sealed made; `offset` of it in the file is for the
// message.
absl::Status CheckSeal(std::string_view bytes, uint64_t size, std::string_view magic,
                       const std::string& path, uint64_t offset) {
  if (bytes.size() != size) {
    return CorruptAt(path, offset,
                     absl::StrCat(bytes.size(), " bytes are there, ", size, " were expected"));
  }
  if (!bytes.starts_with(magic)) {
    return CorruptAt(path, offset, absl::StrCat("\"", Abs(magic), "\" was expected"));
  }
  const std::string_view covered = bytes.substr(0, size - kChecksum);
  if (IntegerAt<uint64_t>(bytes, covered.size()) != Xxh3_64(covered)) {
    return CorruptAt(path, offset, absl::StrCat("the checksum of \"", Abs(magic), "\" is wrong"));
  }
  return absl::OkStatus();
}

absl::Status CheckVersion(uint32_t version, const std::string& path) {
  if (version == kVersion) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path, " has format version ", version,
                                                 ", this program reads version ", kVersion));
}

ShardRecord DecodeEntry(std::string_view entry) {
  ShardRecord record;
  record.unit = IntegerAt<uint32_t>(entry, 0);
  record.type = RecordType::FromNumber(IntegerAt<uint32_t>(entry, 4) & 0xFF);
  const std::string_view kind = entry.substr(8, kKindField);
  record.kind = kind.substr(0, kind.find('\0'));
  const uint64_t first = IntegerAt<uint64_t>(entry, 40);
  record.grains = {first, first + IntegerAt<uint64_t>(entry, 48)};
  record.offset = IntegerAt<uint64_t>(entry, 56);
  record.bytes = IntegerAt<uint64_t>(entry, 64);
  record.checksum = IntegerAt<uint64_t>(entry, 72);
  return record;
}

// Whether an entry is one that a writer could have made.
bool IsSane(std::string_view entry, const ShardRecord& record, uint64_t index_offset) {
  if (!RecordType::IsValid(IntegerAt<uint32_t>(entry, 4))) return false;
  if (!ValidateKind(record.kind).ok()) return false;
  const uint64_t grains = IntegerAt<uint64_t>(entry, 48);
  if (grains == 0 || grains > kMaxRecordGrains) return false;
  if (record.grains.begin > kMaxElements / kGrainElements) return false;
  if (record.bytes != grains * record.type.grain_bytes()) return false;
  return record.offset % kShardAlignment == 0 && record.offset >= kHeaderBytes &&
         record.offset <= index_offset && record.bytes <= index_offset - record.offset;
}

}  // namespace

std::string ShardFileName(uint32_t worker) { return absl::StrCat("shard-", worker, ".zsc"); }

absl::Status ValidateKind(std::string_view kind) {
  bool valid = !kind.empty() && kind.size() <= kMaxKindLength;
  for (char c : kind) {
    valid = valid && ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_');
  }
  if (valid) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("\"", Abs(kind), "\" is no kind of state: [a-z0-9_]{1,31} was expected"));
}

std::string EncodeHeader(const Header& header) {
  std::string bytes(kHeaderMagic);
  AppendInteger(bytes, kVersion);
  AppendInteger(bytes, header.worker);
  AppendInteger(bytes, header.identity.job_id);
  AppendInteger(bytes, header.identity.layout_fingerprint);
  AppendInteger(bytes, header.identity.step);
  return Sealed(std::move(bytes), kHeaderBytes);
}

absl::StatusOr<Header> DecodeHeader(std::string_view bytes, const std::string& path) {
  ZS_RETURN_IF_ERROR(CheckSeal(bytes, kHeaderBytes, kHeaderMagic, path, 0));
  ZS_RETURN_IF_ERROR(CheckVersion(IntegerAt<uint32_t>(bytes, 8), path));
  Header header;
  header.worker = IntegerAt<uint32_t>(bytes, 12);
  header.identity.job_id = IntegerAt<uint64_t>(bytes, 16);
  header.identity.layout_fingerprint = IntegerAt<uint64_t>(bytes, 24);
  header.identity.step = IntegerAt<uint64_t>(bytes, 32);
  return header;
}

std::string EncodeIndex(std::span<const ShardRecord> records) {
  std::string bytes;
  bytes.reserve(records.size() * kEntryBytes);
  for (const ShardRecord& record : records) {
    AppendInteger(bytes, record.unit);
    AppendInteger(bytes, uint32_t{record.type.number()});
    std::string kind = record.kind;
    kind.resize(kKindField, '\0');
    bytes.append(kind);
    AppendInteger(bytes, record.grains.begin);
    AppendInteger(bytes, record.grains.size());
    AppendInteger(bytes, record.offset);
    AppendInteger(bytes, record.bytes);
    AppendInteger(bytes, record.checksum);
  }
  return bytes;
}

absl::StatusOr<std::vector<ShardRecord>> DecodeIndex(std::string_view bytes, uint64_t offset,
                                                     const std::string& path) {
  std::vector<ShardRecord> records;
  if (bytes.size() % kEntryBytes != 0) return CorruptAt(path, offset, "the index is cut off");
  records.reserve(bytes.size() / kEntryBytes);
  for (size_t at = 0; at < bytes.size(); at += kEntryBytes) {
    const std::string_view entry = bytes.substr(at, kEntryBytes);
    ShardRecord record = DecodeEntry(entry);
    if (!IsSane(entry, record, offset)) {
      return CorruptAt(path, offset + at, "the index has an impossible entry");
    }
    records.push_back(std::move(record));
  }
  return records;
}

std::string EncodeFooter(const Footer& footer) {
  std::string bytes(kFooterMagic);
  AppendInteger(bytes, footer.index_offset);
  AppendInteger(bytes, footer.entries);
  AppendInteger(bytes, footer.index_checksum);
  AppendInteger(bytes, footer.header_checksum);
  return Sealed(std::move(bytes), kFooterBytes);
}

absl::StatusOr<Footer> DecodeFooter(std::string_view bytes, uint64_t file_bytes,
                                    const std::string& path) {
  const uint64_t offset = file_bytes - kFooterBytes;
  ZS_RETURN_IF_ERROR(CheckSeal(bytes, kFooterBytes, kFooterMagic, path, offset));
  const Footer footer = {IntegerAt<uint64_t>(bytes, 8), IntegerAt<uint64_t>(bytes, 16),
                         IntegerAt<uint64_t>(bytes, 24), IntegerAt<uint64_t>(bytes, 32)};
  const bool fits = footer.index_offset >= kHeaderBytes && footer.index_offset <= offset &&
                    (offset - footer.index_offset) % kEntryBytes == 0 &&
                    (offset - footer.index_offset) / kEntryBytes == footer.entries;
  if (!fits) return CorruptAt(path, offset, "the footer does not fit the length of the file");
  return footer;
}

std::string EncodeCommit(const Commit& commit) {
  std::string bytes(kCommitMagic);
  AppendInteger(bytes, kVersion);
  AppendInteger(bytes, uint32_t{0});
  AppendInteger(bytes, commit.manifest_bytes);
  AppendInteger(bytes, commit.manifest_checksum);
  return Sealed(std::move(bytes), kCommitBytes);
}

absl::StatusOr<Commit> DecodeCommit(std::string_view bytes, const std::string& path) {
  ZS_RETURN_IF_ERROR(CheckSeal(bytes, kCommitBytes, kCommitMagic, path, 0));
  ZS_RETURN_IF_ERROR(CheckVersion(IntegerAt<uint32_t>(bytes, 8), path));
  return Commit{IntegerAt<uint64_t>(bytes, 16), IntegerAt<uint64_t>(bytes, 24)};
}

}  // namespace zeroshard::shard_format
