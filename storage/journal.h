// Journal: an append-only file of checked records; the daemon's metadata.
//
// What Append acknowledged is replayed by every later Open, in order, or Open fails with DataLoss.
// A record that was being appended when the process or the machine died is there whole or not at
// all. The first error of a write sticks. Payloads are opaque here; the daemon stores
// zeroshard.records.v1.JournalRecord. Format page: docs/journal.md.
//
// One thread at a time; one process at a time (a lock on the file). Fault points: those of
// storage/file_io.h, and storage.journal.rename.
#ifndef ZEROSHARD_STORAGE_JOURNAL_H_
#define ZEROSHARD_STORAGE_JOURNAL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace zeroshard {

inline constexpr uint64_t kMaxJournalPayload = uint64_t{64} << 20;

class Journal {
 public:
  // Called for every record in order; an error ends the replay and is returned by Open. The payload
  // is valid during the call only.
  using Replay = std::function<absl::Status(uint64_t sequence, std::string_view payload)>;

  struct Recovery {
    uint64_t records = 0;
    uint64_t cut_bytes = 0;  // of a record that was being appended when the writer died
  };

  // Opens `name` beneath `dir_fd`, creating it when it is missing, and replays it.
  // Errors: DataLoss naming file and offset (the file is left as it is); FailedPrecondition when
  // another process has it open; InvalidArgument for a name that is not one, a file that is no
  // journal or one of another version.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(int dir_fd, const std::string& name,
                                                       const Replay& replay);

  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // Returns once the record is on disk. InvalidArgument, with nothing written, for an empty payload
  // or one above kMaxJournalPayload.
  absl::Status Append(std::string_view payload);

  // Replaces all records by `payloads`, which must say the same in fewer words.
  absl::Status Compact(std::span<const std::string> payloads);

  const Recovery& recovery() const { return recovery_; }
  // Length of the file.
  uint64_t bytes() const { return end_; }
  // Sequence of the next record.
  uint64_t next_sequence() const { return next_sequence_; }
  // OK, or the error that stuck.
  const absl::Status& status() const { return status_; }

 private:
  Journal() = default;

  absl::Status Load(const Replay& replay);
  absl::Status StartFile(uint64_t first_sequence, std::span<const std::string> payloads,
                         unsigned int rename_flags);

  // Constant after Open.
  UniqueFd directory_;
  std::string name_;
  std::string path_;  // for messages
  Recovery recovery_;

  // State of the file.
  UniqueFd fd_;
  uint64_t id_ = 0;
  uint64_t end_ = 0;
  uint64_t next_sequence_ = 1;
  absl::Status status_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_JOURNAL_H_
