#include "storage/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/random_token.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/file_io.h"
#include "storage/journal_frame.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

using journal_frame::Frame;
using journal_frame::Header;

absl::Status CheckPayload(std::string_view payload) {
  if (!payload.empty() && payload.size() <= kMaxJournalPayload) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a journal record of ", payload.size(), " bytes: 1 to ", kMaxJournalPayload, " are allowed"));
}

absl::Status Lock(int fd, const std::string& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno == EWOULDBLOCK) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is open in another process"));
  }
  return ErrnoError(errno, "lock", path);
}

// Whether `fd` is still the file of that name: a compaction may have replaced it before the lock.
bool IsCurrent(int dir_fd, const std::string& name, int fd) {
  struct stat opened = {};
  struct stat named = {};
  return ::fstat(fd, &opened) == 0 &&
         ::fstatat(dir_fd, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

// The name under which a new file is prepared; one that a crash left is overwritten.
std::string PreparedName(const std::string& name) { return absl::StrCat(".new-", name); }

}  // namespace

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(int dir_fd, const std::string& name,
                                                       const Replay& replay) {
  ZS_RETURN_IF_ERROR(ValidateName(name));
  std::unique_ptr<Journal> journal(new Journal());
  ZS_ASSIGN_OR_RETURN(journal->directory_, DuplicateFd(dir_fd));
  journal->name_ = name;
  journal->path_ = absl::StrCat(DescribeFd(dir_fd), "/", name);
  constexpr int kAttempts = 3;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    absl::StatusOr<UniqueFd> fd = OpenBeneath(dir_fd, name, O_RDWR);
    if (absl::IsNotFound(fd.status())) {
      ZS_RETURN_IF_ERROR(journal->StartFile(1, {}, RENAME_NOREPLACE));
      return journal;
    }
    ZS_RETURN_IF_ERROR(fd.status());
    ZS_RETURN_IF_ERROR(Lock(fd->get(), journal->path_));
    if (!IsCurrent(dir_fd, name, fd->get())) continue;
    journal->fd_ = *std::move(fd);
    ZS_RETURN_IF_ERROR(journal->Load(replay));
    return journal;
  }
  return absl::FailedPreconditionError(
      absl::StrCat(journal->path_, " is being replaced by another process"));
}

absl::Status Journal::Load(const Replay& replay) {
  ZS_ASSIGN_OR_RETURN(const uint64_t file_bytes, RegularFileSize(fd_.get(), path_));
  ZS_ASSIGN_OR_RETURN(const Header header, journal_frame::ReadHeader(fd_.get(), file_bytes, path_));
  id_ = header.id;
  next_sequence_ = header.first_sequence;
  end_ = journal_frame::kSector;
  while (end_ < file_bytes) {
    ZS_ASSIGN_OR_RETURN(
        const std::optional<Frame> frame,
        journal_frame::ReadFrame(fd_.get(), {id_, next_sequence_, end_, file_bytes}, path_));
    if (!frame) break;
    ZS_RETURN_IF_ERROR(Annotate(replay(next_sequence_, frame->payload()),
                                absl::StrCat(path_, " at offset ", end_)));
    end_ += frame->bytes.size();
    ++next_sequence_;
    ++recovery_.records;
  }
  recovery_.cut_bytes = file_bytes - end_;
  if (recovery_.cut_bytes == 0) return absl::OkStatus();
  if (::ftruncate(fd_.get(), static_cast<off_t>(end_)) != 0) {
    return ErrnoErrorAt(errno, "truncate", path_, end_);
  }
  return SyncFile(fd_.get(), path_);
}

absl::Status Journal::Append(std::string_view payload) {
  ZS_RETURN_IF_ERROR(status_);
  ZS_RETURN_IF_ERROR(CheckPayload(payload));
  const std::string frame = journal_frame::EncodeFrame(id_, next_sequence_, payload);
  status_ = WriteAllAt(fd_.get(), AsBytes(frame), end_, path_);
  if (status_.ok()) status_ = SyncFile(fd_.get(), path_);
  if (!status_.ok()) return status_;
  end_ += frame.size();
  ++next_sequence_;
  return absl::OkStatus();
}

absl::Status Journal::Compact(std::span<const std::string> payloads) {
  ZS_RETURN_IF_ERROR(status_);
  for (const std::string& payload : payloads) ZS_RETURN_IF_ERROR(CheckPayload(payload));
  status_ = StartFile(next_sequence_, payloads, 0);
  return status_;
}

absl::Status Journal::StartFile(uint64_t first_sequence, std::span<const std::string> payloads,
                                unsigned int rename_flags) {
  const std::string prepared = PreparedName(name_);
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, OpenBeneath(directory_.get(), prepared, O_RDWR | O_CREAT));
  ZS_RETURN_IF_ERROR(Lock(fd.get(), path_));
  if (::ftruncate(fd.get(), 0) != 0) return ErrnoErrorAt(errno, "truncate", path_, 0);
  const uint64_t id = RandomId();
  const std::string header = journal_frame::EncodeHeader({id, first_sequence});
  ZS_RETURN_IF_ERROR(WriteAllAt(fd.get(), AsBytes(header), 0, path_));
  uint64_t end = header.size();
  uint64_t sequence = first_sequence;
  for (const std::string& payload : payloads) {
    const std::string frame = journal_frame::EncodeFrame(id, sequence++, payload);
    ZS_RETURN_IF_ERROR(WriteAllAt(fd.get(), AsBytes(frame), end, path_));
    end += frame.size();
  }
  ZS_RETURN_IF_ERROR(SyncFile(fd.get(), path_));
  ZS_FAULT_STATUS("storage.journal.rename");
  if (::renameat2(directory_.get(), prepared.c_str(), directory_.get(), name_.c_str(),
                  rename_flags) != 0) {
    return ErrnoError(errno, "rename to", path_);
  }
  // From here on the name stands for the new file, whatever the sync of the directory says.
  fd_ = std::move(fd);
  id_ = id;
  end_ = end;
  next_sequence_ = sequence;
  return SyncDirectory(directory_.get());
}

}  // namespace zeroshard
