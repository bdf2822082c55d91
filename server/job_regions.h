// JobRegions: the shared memory, doorbells and listeners of one job, owned by the server so that
// they outlive every worker and trainer.
//
// Of a job that spans daemons: those of this one. Workers and ranks are numbered as in the job.
//
// Device memory is made by the workers, and its descriptors are kept here with the rest: memory of
// a GPU lives as long as somebody has its descriptor, or has it mapped.
//
// Made whole or not at all. Descriptors stay valid until the object goes. Decision thread.

#ifndef ZEROSHARD_SERVER_JOB_REGIONS_H_
#define ZEROSHARD_SERVER_JOB_REGIONS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "proto/internal.pb.h"
#include "server/planner.h"
#include "storage/board.h"
#include "storage/device_mirror.h"
#include "storage/rank_page.h"

namespace zeroshard {

class JobRegions {
 public:
  struct Options {
    std::string job;
    uint64_t job_id = 0;
    std::string socket_dir;  // of this job; created, and removed with the object
    mode_t directory_mode = 0750;
    mode_t socket_mode = 0660;
  };
  // All memfds sealed, the boards and rank pages formatted, the listeners bound. On an error
  // nothing is left behind.
  static absl::StatusOr<JobRegions> Create(const JobPlan& plan, const Options& options);

  JobRegions(JobRegions&&) = default;
  JobRegions& operator=(JobRegions&&) = delete;
  ~JobRegions();

  // What worker `w` gets with its Start: descriptions, and the descriptors in the same order. The
  // descriptors stay owned by this object.
  struct WorkerView {
    std::vector<internal::v1::WorkerRegion> regions;
    std::vector<int> fds;
  };
  WorkerView ForWorker(const JobPlan& plan, uint32_t w) const;

  // Keeps device memory that worker `w` has made. InvalidArgument, AlreadyExists: it is not what
  // the plan says, or was made before.
  absl::Status AdoptDevice(const JobPlan& plan, uint32_t w,
                           const internal::v1::WorkerRegion& description, UniqueFd fd);
  // Whether worker `w` has handed all of its device memory over.
  bool HasDevice(uint32_t w) const {
    return FindDevice(internal::v1::WorkerRegion::KIND_DEVICE_SHARED, w) != nullptr &&
           FindDevice(internal::v1::WorkerRegion::KIND_DEVICE_STATES, w) != nullptr;
  }
  // The device of worker `w` is lost: its memory goes with the last process that maps it.
  void ForgetDevice(uint32_t w);
  // What the mirror of each worker holds; empty without mirrors.
  std::vector<std::vector<MirrorPoint>> Mirrors() const;
  // No stream waits any longer for what a dead generation will not do; workers set the counters
  // back for the next one.
  void KillCounters() const;

  // What rank `r` gets: parameter window (read-only), gradient window, rank page (read-only); with
  // a data plane the shared device memory and the counters of its worker, and no parameter window.
  struct RankRegion {
    internal::v1::WorkerRegion::Kind kind;
    uint64_t bytes;
    int fd;
  };
  std::vector<RankRegion> ForRank(const JobPlan& plan, uint32_t r) const;

  // The ranks and workers of this node only.
  RankPage& rank_page(uint32_t r) const {
    return *rank_pages_[r - placement_.first_rank()].As<RankPage>();
  }
  const Board& board() const { return boards_.front(); }
  // The highest attempt of any board.
  uint64_t LastAttempt() const;
  // The sign of life of a worker of this node, numbered as in the job.
  uint64_t Beats(const JobPlan& plan, uint32_t w) const;
  const std::string& socket_path(uint32_t w) const {
    return socket_paths_[w - placement_.first_worker()];
  }

  // Bytes of memory behind all regions now.
  uint64_t AllocatedBytes() const;

 private:
  struct Region {
    RegionPlan plan;
    UniqueFd fd;
    UniqueFd read_only;  // invalid where readers get none
  };
  struct Device {
    internal::v1::WorkerRegion region;
    UniqueFd fd;
  };
  explicit JobRegions(const Placement& placement) : placement_(placement) {}
  const Device* FindDevice(internal::v1::WorkerRegion::Kind kind, uint32_t w) const;
  absl::Status CreateMemory(const JobPlan& plan, const Options& options);
  absl::Status Format(const JobPlan& plan, const Options& options);
  absl::Status CreateListeners(const JobPlan& plan, const Options& options);
  const Region& Find(internal::v1::WorkerRegion::Kind kind, uint32_t index) const;

  Placement placement_;
  uint64_t job_id_ = 0;
  std::vector<Region> regions_;
  std::vector<UniqueFd> doorbells_;  // one a worker of this node, like all below
  std::vector<UniqueFd> listeners_;
  std::vector<std::string> socket_paths_;
  std::string socket_dir_;
  std::vector<MappedRegion> board_maps_;  // one an island
  std::vector<Board> boards_;
  std::vector<MappedRegion> rank_pages_;
  std::vector<MappedRegion> counters_;  // one a worker with a GPU
  std::vector<MappedRegion> mirrors_;   // one a worker with a mirror; their headers are read
  std::vector<Device> devices_;         // device memory, as workers have made it
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_JOB_REGIONS_H_
