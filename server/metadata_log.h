// MetadataLog: the daemon's journal, written by a thread of its own so that no decision waits for a
// disk.
//
// Append may be called from any thread. The first error of a write sticks and is logged once; jobs
// go on, because the journal serves a later start of the daemon, not the present one.

#ifndef ZEROSHARD_SERVER_METADATA_LOG_H_
#define ZEROSHARD_SERVER_METADATA_LOG_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/records.pb.h"
#include "storage/journal.h"

namespace zeroshard {

class MetadataLog {
 public:
  // Opens `jobs.journal` in the directory `state_dir` and replays it. The memory of jobs that an
  // earlier daemon held ended with that daemon: they are named in lost_jobs() and marked as ended,
  // but for those whose states survive it, which stay in the journal.
  static absl::StatusOr<std::unique_ptr<MetadataLog>> Open(const std::string& state_dir);

  // Writes what is queued, then ends the thread.
  ~MetadataLog();

  void Append(records::v1::JournalRecord record);

  const std::vector<std::string>& lost_jobs() const { return lost_jobs_; }
  // Jobs with durability power that have not ended.
  const std::vector<records::v1::JobCreated>& power_jobs() const { return power_jobs_; }
  // Those that ended with the last daemon, or before; files of theirs may be left.
  const std::set<uint64_t>& ended_power_jobs() const { return ended_power_jobs_; }

 private:
  MetadataLog() = default;
  void Run();
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stop_ || !queue_.empty(); }

  // Constant after Open.
  std::vector<std::string> lost_jobs_;
  std::vector<records::v1::JobCreated> power_jobs_;
  std::set<uint64_t> ended_power_jobs_;

  // Writer thread only.
  std::unique_ptr<Journal> journal_;

  absl::Mutex mu_;
  std::deque<records::v1::JournalRecord> queue_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_METADATA_LOG_H_
