// DriveWatch: the health of the drives behind the paths of the NVMe tier, read now and then.
//
// By a thread of its own, because a drive in trouble takes seconds to answer; the decision thread
// only looks at the latest reading. All methods may be called from any thread. The destructor waits
// for a reading that is being made.
#ifndef ZEROSHARD_SERVER_DRIVE_WATCH_H_
#define ZEROSHARD_SERVER_DRIVE_WATCH_H_

#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "storage/drive_health.h"

namespace zeroshard {

// What lies behind a path: drives, or why none are known.
struct PathHealth {
  absl::Status status;
  std::vector<DriveHealth> drives;
};

class DriveWatch {
 public:
  DriveWatch(DriveSources sources, absl::Duration interval);
  ~DriveWatch();
  DriveWatch(const DriveWatch&) = delete;
  DriveWatch& operator=(const DriveWatch&) = delete;

  // The paths to read; those that are new are read at once.
  void Watch(const std::vector<std::string>& paths);
  // By path; without those that were not read yet.
  std::map<std::string, PathHealth> latest() const;
  // Blocks until all paths have been read by a reading that began after the call.
  void AwaitReading() const;

 private:
  void Run();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const DriveSources sources_;
  const absl::Duration interval_;
  mutable absl::Mutex mu_;
  std::vector<std::string> paths_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, PathHealth> latest_ ABSL_GUARDED_BY(mu_);
  uint64_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t finished_ ABSL_GUARDED_BY(mu_) = 0;
  bool changed_ ABSL_GUARDED_BY(mu_) = false;  // there are new paths
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DRIVE_WATCH_H_
