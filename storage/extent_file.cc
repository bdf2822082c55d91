#include "storage/extent_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/chunk_image.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x31544e545845535aULL;  // "ZSEXTNT1"
constexpr uint32_t kVersion = 1;
constexpr uint64_t kSuperblockBytes = 4096;
constexpr uint64_t kFillBytes = uint64_t{4} << 20;
constexpr uint64_t kSyncBytes = uint64_t{64} << 20;

// Bytes of the file that are locked; none of them is one of the data.
constexpr off_t kOwnerByte = 0;
constexpr off_t kGenerationBytes = off_t{1} << 32;
constexpr off_t kGenerations = off_t{1} << 31;

struct Superblock {
  uint64_t magic;
  uint32_t version;
  uint32_t zero;
  uint64_t job_id;
  uint64_t layout_fingerprint;
  uint64_t plan_fingerprint;
  uint32_t worker;
  uint32_t path;
  uint64_t file_bytes;
  uint64_t zeros[504];
  uint64_t checksum;
};
static_assert(sizeof(Superblock) == kSuperblockBytes);

uint64_t Checksum(const Superblock& block) {
  return Xxh3_64(&block, offsetof(Superblock, checksum));
}

Superblock MakeSuperblock(const ExtentIdentity& identity) {
  Superblock block = {};
  block.magic = kMagic;
  block.version = kVersion;
  block.job_id = identity.job_id;
  block.layout_fingerprint = identity.layout_fingerprint;
  block.plan_fingerprint = identity.plan_fingerprint;
  block.worker = identity.worker;
  block.path = identity.path;
  block.file_bytes = identity.file_bytes;
  block.checksum = Checksum(block);
  return block;
}

absl::Status WithNumbers(int fd, uint64_t bytes, const absl::Status& status) {
  struct statvfs volume = {};
  if (!absl::IsResourceExhausted(status) || ::fstatvfs(fd, &volume) != 0) return status;
  return Annotate(status, Std(absl::StrCat("an extent file needs ", bytes, " bytes, ",
                                           uint64_t{volume.f_bavail} * volume.f_frsize,
                                           " are left on its file system")));
}

// Writes every byte once: zeros, then the superblock.
absl::Status Fill(int fd, bool direct, const ExtentIdentity& identity, const std::string& name,
                  absl::FunctionRef<void()> progress) {
  if (direct && ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_DIRECT) != 0) {
    return ErrnoError(errno, "set O_DIRECT on", name);
  }
  const DirectBuffer zeros(std::min(kFillBytes, identity.file_bytes));
  for (uint64_t at = 0; at < identity.file_bytes; at += zeros.span().size()) {
    const uint64_t bytes = std::min<uint64_t>(zeros.span().size(), identity.file_bytes - at);
    ZS_RETURN_IF_ERROR(WriteAllAt(fd, zeros.span().first(bytes), at, name));
    // In pieces, so that the last one is not a wait for all of them.
    if (!direct && (at + bytes) % kSyncBytes == 0) ZS_RETURN_IF_ERROR(SyncFile(fd, name));
    progress();
  }
  const Superblock block = MakeSuperblock(identity);
  const DirectBuffer buffer(kSuperblockBytes);
  std::memcpy(buffer.span().data(), &block, sizeof(block));
  return WriteAllAt(fd, buffer.span(), 0, name);
}

// A lock of the open file description; EAGAIN when another one has it.
int LockByte(int fd, int16_t type, off_t byte) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return ::fcntl(fd, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

// Whether another description has a lock within [begin, end).
absl::StatusOr<bool> IsLocked(int fd, off_t begin, off_t end, const std::string& name) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = begin;
  lock.l_len = end - begin;
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) return ErrnoError(errno, "query the locks of", name);
  return lock.l_type != F_UNLCK;
}

absl::Status CompareIdentities(const ExtentIdentity& found, const ExtentIdentity& expected,
                               const std::string& name) {
  const struct {
    const char* what;
    uint64_t found, expected;
  } fields[] = {{"job", found.job_id, expected.job_id},
                {"worker", found.worker, expected.worker},
                {"path", found.path, expected.path},
                {"layout", found.layout_fingerprint, expected.layout_fingerprint},
                {"plan", found.plan_fingerprint, expected.plan_fingerprint},
                {"length", found.file_bytes, expected.file_bytes}};
  for (const auto& field : fields) {
    if (field.found == field.expected) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        name, " is an extent file of ", field.what, " ", absl::Hex(field.found), ", ",
        absl::Hex(field.expected), " is expected; remove it if nothing else needs it"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string ExtentFileName(uint64_t job_id, uint32_t worker, uint32_t path) {
  return absl::StrCat("job-", absl::Hex(job_id, absl::kZeroPad16), ".w", worker, ".p", path,
                      ".extent");
}

std::string ManifestFileName(uint64_t job_id, uint32_t worker) {
  return absl::StrCat("job-", absl::Hex(job_id, absl::kZeroPad16), ".w", worker, ".manifest");
}

absl::Status ExtentFile::Create(const NvmePath& path, const ExtentIdentity& identity,
                                absl::FunctionRef<void()> progress) {
  if (identity.file_bytes < kSuperblockBytes || identity.file_bytes % kImageAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("an extent file of ", identity.file_bytes, " bytes"));
  }
  const std::string file_name = ExtentFileName(identity.job_id, identity.worker, identity.path);
  const std::string name = absl::StrCat(DescribeFd(path.directory.get()), "/", file_name);
  ZS_ASSIGN_OR_RETURN(TemporaryFile file,
                      TemporaryFile::Create(path.directory.get(), file_name, Existing::kRefuse));
  ZS_RETURN_IF_ERROR(ReserveSpace(file.fd(), identity.file_bytes, name));
  if (absl::Status filled = Fill(file.fd(), path.direct, identity, name, progress); !filled.ok()) {
    return WithNumbers(file.fd(), identity.file_bytes, filled);
  }
  return std::move(file).Commit();
}

absl::Status ExtentFile::RemoveUnused(const NvmePath& path, const ExtentIdentity& identity) {
  const int directory = path.directory.get();
  const std::string name = ExtentFileName(identity.job_id, identity.worker, identity.path);
  ZS_RETURN_IF_ERROR(RemoveTemporariesOf(directory, name).status());
  const absl::StatusOr<UniqueFd> fd = OpenBeneath(directory, name, O_RDWR);
  if (absl::IsNotFound(fd.status())) return absl::OkStatus();
  if (!fd.ok()) return fd.status();
  const std::string full = DescribeFd(fd->get());
  ZS_ASSIGN_OR_RETURN(const bool used, ExtentInUse(fd->get(), full));
  if (used) return absl::FailedPreconditionError(absl::StrCat(full, " is used by another process"));
  if (::unlinkat(directory, name.c_str(), 0) != 0) return ErrnoError(errno, "remove", full);
  return absl::OkStatus();
}

void ExtentFile::Abandon() && {
  static_cast<void>(fd_.release());
  lock_.reset();
}

absl::StatusOr<ExtentFile> ExtentFile::Adopt(const NvmePath& path, const ExtentIdentity& identity,
                                             uint64_t generation) {
  if (generation == 0 || generation >= static_cast<uint64_t>(kGenerations)) {
    return absl::InvalidArgumentError(absl::StrCat("generation ", generation));
  }
  const std::string file_name = ExtentFileName(identity.job_id, identity.worker, identity.path);
  ExtentFile file;
  file.generation_ = generation;
  file.direct_ = path.direct;
  ZS_ASSIGN_OR_RETURN(file.lock_, OpenBeneath(path.directory.get(), file_name, O_RDWR));
  file.name_ = DescribeFd(file.lock_.get());
  if (const int error = LockByte(file.lock_.get(), F_WRLCK, kOwnerByte); error != 0) {
    if (error != EAGAIN && error != EACCES) return ErrnoError(error, "lock", file.name_);
    return absl::FailedPreconditionError(
        absl::StrCat(file.name_,
                     " is used by another process; two daemons, or two workers of "
                     "one number, share the path"));
  }
  ZS_ASSIGN_OR_RETURN(const uint64_t size, RegularFileSize(file.lock_.get(), file.name_));
  ZS_ASSIGN_OR_RETURN(const ExtentIdentity found, ReadExtentIdentity(file.lock_.get(), file.name_));
  ZS_RETURN_IF_ERROR(CompareIdentities(found, identity, file.name_));
  if (size != found.file_bytes) {
    return CorruptAt(
        file.name_, std::min(size, found.file_bytes),
        Std(absl::StrCat("the file has ", size, " bytes, its superblock says ", found.file_bytes)));
  }
  const int direct = path.direct ? O_DIRECT : 0;
  ZS_ASSIGN_OR_RETURN(file.fd_, OpenBeneath(path.directory.get(), file_name, O_RDWR | direct));
  const auto byte = kGenerationBytes + static_cast<off_t>(generation);
  if (const int error = LockByte(file.fd_.get(), F_WRLCK, byte); error != 0) {
    return ErrnoError(error, absl::StrCat("lock generation ", generation, " of"), file.name_);
  }
  return file;
}

absl::StatusOr<bool> ExtentFile::Drained() const {
  // All bytes but its own: generations before a lost region may have been higher.
  const off_t own = kGenerationBytes + static_cast<off_t>(generation_);
  ZS_ASSIGN_OR_RETURN(const bool lower, IsLocked(lock_.get(), kGenerationBytes, own, name_));
  ZS_ASSIGN_OR_RETURN(const bool higher,
                      IsLocked(lock_.get(), own + 1, kGenerationBytes + kGenerations, name_));
  return !lower && !higher;
}

absl::Status ExtentFile::Flush() const { return SyncFile(fd_.get(), name_); }

absl::StatusOr<ExtentIdentity> ReadExtentIdentity(int fd, const std::string& name) {
  ZS_ASSIGN_OR_RETURN(const uint64_t size, RegularFileSize(fd, name));
  if (size < kSuperblockBytes) {
    return CorruptAt(name, size, "the file ends before the end of its superblock");
  }
  const DirectBuffer buffer(kSuperblockBytes);
  ZS_RETURN_IF_ERROR(ReadAllAt(fd, buffer.span(), 0, name));
  Superblock block;
  std::memcpy(&block, buffer.span().data(), sizeof(block));
  if (block.magic != kMagic) return CorruptAt(name, 0, "no extent file: the magic number differs");
  if (block.version != kVersion) {
    return CorruptAt(
        name, 8,
        Std(absl::StrCat("extent file of version ", block.version, ", ", kVersion, " expected")));
  }
  if (block.checksum != Checksum(block)) {
    return CorruptAt(name, 0, "torn or flipped superblock: its checksum differs");
  }
  ExtentIdentity identity;
  identity.job_id = block.job_id;
  identity.layout_fingerprint = block.layout_fingerprint;
  identity.plan_fingerprint = block.plan_fingerprint;
  identity.worker = block.worker;
  identity.path = block.path;
  identity.file_bytes = block.file_bytes;
  return identity;
}

absl::StatusOr<bool> ExtentInUse(int fd, const std::string& name) {
  return IsLocked(fd, kOwnerByte, kOwnerByte + 1, name);
}

}  // namespace zeroshard
