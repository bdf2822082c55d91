#include "server/job_regions.h"

#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fd_passing.h"
#include "base/status.h"
#include "device/cuda/address.h"
#include "storage/device_counters.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;

const char* KindName(WorkerRegion::Kind kind) {
  switch (kind) {
    case WorkerRegion::KIND_PARTITION:
      return "partition";
    case WorkerRegion::KIND_PARAMETER_WINDOW:
      return "parameters";
    case WorkerRegion::KIND_GRADIENT_WINDOW:
      return "gradients";
    case WorkerRegion::KIND_BOARD:
      return "board";
    case WorkerRegion::KIND_RANK_PAGE:
      return "rank-page";
    case WorkerRegion::KIND_LOCAL_ACCUMULATOR:
      return "local";
    case WorkerRegion::KIND_USER_STATE:
      return "user-state";
    case WorkerRegion::KIND_SLOT_TABLE:
      return "slots";
    case WorkerRegion::KIND_DEVICE_TABLE:
      return "device-table";
    case WorkerRegion::KIND_DEVICE_COUNTERS:
      return "device-counters";
    case WorkerRegion::KIND_DEVICE_MIRROR:
      return "device-mirror";
    default:
      return "region";
  }
}

bool TrainersRead(WorkerRegion::Kind kind) {
  return kind == WorkerRegion::KIND_PARAMETER_WINDOW || kind == WorkerRegion::KIND_RANK_PAGE;
}

WorkerRegion Describe(WorkerRegion::Kind kind, uint32_t index, uint64_t bytes) {
  WorkerRegion region;
  region.set_kind(kind);
  region.set_index(index);
  region.set_bytes(bytes);
  return region;
}

bool OfOneWorker(WorkerRegion::Kind kind) {
  return kind == WorkerRegion::KIND_PARTITION || kind == WorkerRegion::KIND_SLOT_TABLE ||
         kind == WorkerRegion::KIND_DEVICE_TABLE || kind == WorkerRegion::KIND_DEVICE_COUNTERS ||
         kind == WorkerRegion::KIND_DEVICE_MIRROR;
}

// Whether worker `w` maps a region: its own partition, tables and counters, and what its island
// shares. The pages of ranks go to their home worker only, which is their one writer.
bool WorkerMaps(const JobPlan& plan, const RegionPlan& region, uint32_t w) {
  if (OfOneWorker(region.kind)) return region.index == w;
  if (region.kind == WorkerRegion::KIND_RANK_PAGE) {
    return plan.ranks[region.index].home_worker() == w;
  }
  return region.island == plan.workers[w].island();
}

}  // namespace

absl::StatusOr<JobRegions> JobRegions::Create(const JobPlan& plan, const Options& options) {
  JobRegions regions(plan.placement);
  regions.job_id_ = options.job_id;
  ZS_RETURN_IF_ERROR(regions.CreateMemory(plan, options));
  ZS_RETURN_IF_ERROR(regions.Format(plan, options));
  ZS_RETURN_IF_ERROR(regions.CreateListeners(plan, options));
  return regions;
}

JobRegions::~JobRegions() {
  for (const std::string& path : socket_paths_) unlink(path.c_str());
  if (!socket_dir_.empty()) rmdir(socket_dir_.c_str());
}

absl::Status JobRegions::CreateMemory(const JobPlan& plan, const Options& options) {
  for (const RegionPlan& region_plan : plan.regions) {
    const std::string name = absl::StrCat("zeroshard:", options.job, ":",
                                          KindName(region_plan.kind), "-", region_plan.index);
    Region region;
    region.plan = region_plan;
    ZS_ASSIGN_OR_RETURN(region.fd, CreateSealedMemfd(name, region_plan.bytes));
    if (TrainersRead(region_plan.kind)) {
      ZS_ASSIGN_OR_RETURN(region.read_only, ReopenReadOnly(region.fd.get()));
    }
    regions_.push_back(std::move(region));
  }
  for (uint32_t w = 0; w < placement_.workers; ++w) {
    UniqueFd doorbell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!doorbell.valid()) return ErrnoError(errno, "eventfd", absl::StrCat("doorbell ", w));
    doorbells_.push_back(std::move(doorbell));
  }
  return absl::OkStatus();
}

absl::Status JobRegions::Format(const JobPlan& plan, const Options& options) {
  const uint64_t fingerprint = plan.layout.front().fingerprint();
  for (uint32_t island = 0; island < plan.islands; ++island) {
    if (!plan.has_island(island)) continue;
    const Region& region = Find(WorkerRegion::KIND_BOARD, island);
    ZS_ASSIGN_OR_RETURN(MappedRegion map,
                        MappedRegion::Map(region.fd.get(), region.plan.bytes, Access::kReadWrite));
    ZS_ASSIGN_OR_RETURN(Board board, Board::Format(map.bytes(), plan.board, options.job_id,
                                                   fingerprint, plan.config.loss_scale().initial(),
                                                   plan.config.loss_scale().hysteresis()));
    board_maps_.push_back(std::move(map));
    boards_.push_back(board);
  }
  for (uint32_t r = 0; r < plan.ranks.size(); ++r) {
    if (!placement_.has_rank(r)) continue;
    const Region& region = Find(WorkerRegion::KIND_RANK_PAGE, r);
    ZS_ASSIGN_OR_RETURN(MappedRegion map,
                        MappedRegion::Map(region.fd.get(), region.plan.bytes, Access::kReadWrite));
    RankPage* page = new (map.data()) RankPage;
    page->job_id = options.job_id;
    rank_pages_.push_back(std::move(map));
  }
  for (const Region& region : regions_) {
    const bool counters = region.plan.kind == WorkerRegion::KIND_DEVICE_COUNTERS;
    if (!counters && region.plan.kind != WorkerRegion::KIND_DEVICE_MIRROR) continue;
    ZS_ASSIGN_OR_RETURN(MappedRegion map,
                        MappedRegion::Map(region.fd.get(), region.plan.bytes,
                                          counters ? Access::kReadWrite : Access::kReadOnly));
    (counters ? counters_ : mirrors_).push_back(std::move(map));
  }
  return absl::OkStatus();
}

absl::Status JobRegions::AdoptDevice(const JobPlan& plan, uint32_t w,
                                     const WorkerRegion& description, UniqueFd fd) {
  const GpuBytes& expected = plan.gpus[w - placement_.first_worker()];
  const bool shared = description.kind() == WorkerRegion::KIND_DEVICE_SHARED;
  if ((!shared && description.kind() != WorkerRegion::KIND_DEVICE_STATES) ||
      description.index() != w || !fd.valid()) {
    return absl::InvalidArgumentError("a region that is no device memory of the worker");
  }
  const uint64_t least = shared ? expected.shared : expected.states;
  if (description.bytes() < least) {
    return absl::InvalidArgumentError(
        absl::StrCat("device memory of ", description.bytes(), " bytes; the plan has ", least));
  }
  if (FindDevice(description.kind(), w) != nullptr) {
    return absl::AlreadyExistsError("device memory of which the job has some already");
  }
  devices_.push_back({description, std::move(fd)});
  return absl::OkStatus();
}

const JobRegions::Device* JobRegions::FindDevice(WorkerRegion::Kind kind, uint32_t w) const {
  for (const Device& device : devices_) {
    if (device.region.kind() == kind && device.region.index() == w) return &device;
  }
  return nullptr;
}

void JobRegions::ForgetDevice(uint32_t w) {
  std::erase_if(devices_, [w](const Device& device) { return device.region.index() == w; });
}

std::vector<std::vector<MirrorPoint>> JobRegions::Mirrors() const {
  std::vector<std::vector<MirrorPoint>> points;
  for (const MappedRegion& mirror : mirrors_) {
    points.push_back(DeviceMirror::PointsIn(mirror.bytes(), job_id_));
  }
  return points;
}

uint64_t JobRegions::LastAttempt() const {
  uint64_t last = 0;
  for (const Board& board : boards_) last = std::max(last, board.attempt());
  return last;
}

void JobRegions::KillCounters() const {
  for (const MappedRegion& map : counters_) {
    DeviceCounters& counters = *map.As<DeviceCounters>();
    counters.summed.store(kDeadCounter, std::memory_order_release);
    counters.error.store(kDeadCounter, std::memory_order_release);
  }
}

uint64_t JobRegions::Beats(const JobPlan& plan, uint32_t w) const {
  const uint32_t first = plan.workers[placement_.first_worker()].island();
  const Board& board = boards_[plan.workers[w].island() - first];
  return board.worker(w).beats.load(std::memory_order_relaxed);
}

absl::Status JobRegions::CreateListeners(const JobPlan& plan, const Options& options) {
  if (mkdir(options.socket_dir.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoError(errno, "mkdir", options.socket_dir);
  }
  socket_dir_ = options.socket_dir;
  if (chmod(options.socket_dir.c_str(), options.directory_mode) != 0) {
    return ErrnoError(errno, "chmod", options.socket_dir);
  }
  for (uint32_t w = 0; w < plan.workers.size(); ++w) {
    if (!placement_.has_worker(w)) continue;
    const std::string path = absl::StrCat(options.socket_dir, "/worker-", w, ".sock");
    ZS_ASSIGN_OR_RETURN(UniqueFd listener,
                        ListenUnix(path, options.socket_mode, UnixSocketType::kStream));
    listeners_.push_back(std::move(listener));
    socket_paths_.push_back(path);
  }
  return absl::OkStatus();
}

const JobRegions::Region& JobRegions::Find(WorkerRegion::Kind kind, uint32_t index) const {
  for (const Region& region : regions_) {
    if (region.plan.kind == kind && region.plan.index == index) return region;
  }
  static const Region kNone;  // a plan names every region that is looked for
  return kNone;
}

JobRegions::WorkerView JobRegions::ForWorker(const JobPlan& plan, uint32_t w) const {
  WorkerView view;
  auto add = [&](WorkerRegion::Kind kind, uint32_t index, uint64_t bytes, int fd) {
    view.regions.push_back(Describe(kind, index, bytes));
    view.fds.push_back(fd);
  };
  for (const Region& region : regions_) {
    if (!WorkerMaps(plan, region.plan, w)) continue;
    add(region.plan.kind, region.plan.index, region.plan.bytes, region.fd.get());
  }
  for (const Device& device : devices_) {
    if (device.region.index() != w) continue;
    view.regions.push_back(device.region);
    view.fds.push_back(device.fd.get());
  }
  for (uint32_t other = 0; other < plan.workers.size(); ++other) {
    if (plan.workers[other].island() != plan.workers[w].island()) continue;
    add(WorkerRegion::KIND_DOORBELL, other, 0, doorbells_[other - placement_.first_worker()].get());
  }
  add(WorkerRegion::KIND_LISTENER, w, 0, listeners_[w - placement_.first_worker()].get());
  return view;
}

std::vector<JobRegions::RankRegion> JobRegions::ForRank(const JobPlan& plan, uint32_t r) const {
  const Region& window = Find(WorkerRegion::KIND_PARAMETER_WINDOW, plan.ranks[r].island());
  const Region& gradients = Find(WorkerRegion::KIND_GRADIENT_WINDOW, r);
  const Region& page = Find(WorkerRegion::KIND_RANK_PAGE, r);
  const uint32_t home = plan.ranks[r].home_worker();
  if (const Device* shared = FindDevice(WorkerRegion::KIND_DEVICE_SHARED, home)) {
    const Region& counters = Find(WorkerRegion::KIND_DEVICE_COUNTERS, home);
    return {{window.plan.kind, window.plan.bytes, window.read_only.get()},
            {gradients.plan.kind, gradients.plan.bytes, gradients.fd.get()},
            {page.plan.kind, page.plan.bytes, page.read_only.get()},
            {shared->region.kind(), shared->region.bytes(), shared->fd.get()},
            {counters.plan.kind, counters.plan.bytes, counters.fd.get()}};
  }
  return {{window.plan.kind, window.plan.bytes, window.read_only.get()},
          {gradients.plan.kind, gradients.plan.bytes, gradients.fd.get()},
          {page.plan.kind, page.plan.bytes, page.read_only.get()}};
}

uint64_t JobRegions::AllocatedBytes() const {
  uint64_t bytes = 0;
  for (const Region& region : regions_) {
    if (auto allocated = zeroshard::AllocatedBytes(region.fd.get()); allocated.ok()) {
      bytes += *allocated;
    }
  }
  return bytes;
}

}  // namespace zeroshard
