// LocalJob: a whole job in one process, without server, gRPC or trainers.
//
// W real engines over real shared regions, R ranks as plain calls. What would be processes takes
// turns on the test's thread, so a test decides who does what when; a worker "dies" by being thrown
// away and started again on the same regions. Everything is run until nothing moves any more.
#ifndef ZEROSHARD_TESTS_FAKES_LOCAL_JOB_H_
#define ZEROSHARD_TESTS_FAKES_LOCAL_JOB_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "device/cpu/thread_pool.h"
#include "proto/internal.pb.h"
#include "storage/board.h"
#include "storage/layout.h"
#include "tests/fakes/loopback_mesh.h"
#include "worker/device_shard.h"
#include "worker/engine.h"
#include "worker/job_memory.h"
#include "worker/nvme_tier.h"

namespace zeroshard {

// What ranks with a data plane do beside their requests.
class LocalDataPlane {
 public:
  struct Gradient {
    uint32_t rank = 0;
    uint32_t unit = 0;
    uint32_t micro_step = 0;
    std::span<const std::byte> values;  // of the whole unit, in its type
    Presence present = {};
    float weight = 1.0f;
  };
  virtual ~LocalDataPlane() = default;
  virtual void Scatter(const Gradient& gradient) = 0;
  // The rank arrives next: its worker's slices of all ranks' gradients are summed, and `summed`
  // says so.
  virtual void Boundary(uint32_t rank, uint64_t attempt) = 0;
};

struct LocalJobOptions {
  model::v1::Manifest manifest;
  model::v1::EngineConfig config;  // world_size is the number of ranks
  uint32_t workers = 1;
  uint32_t lanes = 1;
  // Every worker an island of its own, over a loopback mesh.
  bool islands = false;
  // Where the files of a job with an NVMe tier lie; the directories must outlive it.
  std::vector<std::string> nvme_paths = {};
  // What its queues are made by, of worker `worker`.
  std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(uint32_t worker, const IoQueueOptions&)>
      make_queue = {};
  // Goes on from what a job with durability power left on its paths; see LocalJob::resumable.
  bool resume = false;
  // Of a job with a data plane: what opens a worker's device, and the ranks' data planes.
  std::function<absl::StatusOr<std::unique_ptr<DeviceShard>>(JobMemory&)> open_device = {};
  LocalDataPlane* data_plane = nullptr;
  // Only regions are made: workers and ranks live in child processes (LocalJob::RunProcess).
  bool in_processes = false;
};

// A manifest of fp32-or-other parameters named p0, p1, ... with these element counts, one module
// each.
model::v1::Manifest MakeManifest(const std::vector<uint64_t>& sizes, model::v1::DType dtype);
// AdamW, accumulators fp32, no clipping, static scale 1.
model::v1::EngineConfig MakeConfig(uint32_t stage, uint32_t ranks, model::v1::DType dtype);

// Puts masters and optimizer states, and with `parameters` the shards, on the NVMe tier.
void UseNvme(model::v1::EngineConfig& config, double ratio, bool parameters);

class LocalJob {
 public:
  explicit LocalJob(LocalJobOptions options);
  ~LocalJob();

  // Whether the paths hold a state of that job, and which; DataLoss when there should be one.
  static absl::StatusOr<ManifestState> Resumable(const LocalJobOptions& options);

  const Layout& layout() const { return *layout_; }
  Engine& engine(uint32_t worker) { return *workers_[worker].engine; }
  // Of a job with a data plane; the engine's.
  DeviceShard& device(uint32_t worker) { return *workers_[worker].device; }
  JobMemory& memory(uint32_t worker) { return *workers_[worker].memory; }
  ManualClock& clock() { return clock_; }
  uint32_t ranks() const { return options_.config.world_size(); }

  // Every method that sends returns the request's id; Run moves everything until nothing moves.
  void Hello(uint32_t rank, bool reconnect);
  uint64_t Send(uint32_t rank, trainer::v1::SessionRequest request);
  // Says hello to the successor of the home worker and sends again whatever is not complete, as a
  // client does.
  void Reconnect(uint32_t rank);
  // Sends the request again with its id.
  void Resend(uint32_t rank, const trainer::v1::SessionRequest& request);
  void Run();
  // One turn of one worker: takes what was sent to it and does all it can now.
  void RunWorker(uint32_t w);
  // The same, but only what `peer` sent has arrived.
  void RunWorkerWithFrames(uint32_t w, uint32_t peer);
  bool Done(uint32_t rank, uint64_t id) const;

  // Rank 0 puts `values` (fp32, converted to the unit's type) of a parameter's whole unit.
  void PutParameters(const std::vector<std::vector<float>>& values);
  // One gradient per parameter, all ranks alike in shape; scatters unit by unit through the window.
  // An empty vector means that the parameter has no gradient.
  std::vector<uint64_t> ScatterAll(uint32_t rank, uint32_t micro_step,
                                   const std::vector<std::vector<float>>& gradients,
                                   float weight = 0.0f);
  uint64_t Step(uint32_t rank, uint32_t micro_steps, double lr, const std::string& user_state = "",
                double weight_total = 0.0);

  // The process of worker `w` dies between two rounds; its successor recovers.
  void RestartWorker(uint32_t w);
  // The same in two parts. An error is the device's; then there is no worker `w`.
  void StopWorker(uint32_t w);
  absl::Status TryStartWorker(uint32_t w);
  // The same, and with it what its device held.
  void LoseDevice(uint32_t w) {
    made_[w].clear();
    RestartWorker(w);
  }
  // Runs what is under way in a child process, all workers of which die of `faults` (see
  // base/fault_point.h; empty: of a kill after `delay`), or come to rest. Their successors are
  // here, what was under way is not done yet. Returns whether they died.
  bool RunInChild(const std::string& faults, absl::Duration delay = absl::InfiniteDuration());

  // With `in_processes`: all workers and ranks are a new process, which does `work` and ends or
  // dies of `faults`. Those of the first process are fresh, others find the regions of the one
  // before, and its step in flight is dropped unless it is decided. Returns whether it died.
  bool RunProcess(const std::string& faults, const std::function<void()>& work);

  // Everybody does what was left for quiet times until all states are where they shall rest.
  void RunMoves();

  // All frames under way are lost and the mesh is set up again.
  void BreakMesh();

  // The parameter as fp32, from the window (of an island).
  std::vector<float> Parameter(uint32_t parameter, uint32_t island = 0) const;
  // Raw bytes of all states in grain order, the same for every W: parameters, masters, optimizer
  // states.
  std::string StateBytes();

  // Failures reported to a rank, and what was said to the server.
  std::vector<trainer::v1::Failure>& failures(uint32_t rank) { return failures_[rank]; }
  const trainer::v1::HelloReply& hello(uint32_t rank) { return hellos_[rank]; }
  std::vector<internal::v1::FromWorker>& reports() { return reports_; }
  StepResult result(uint32_t rank) const;
  std::byte* gradient_window(uint32_t rank) { return gradient_windows_[rank].data(); }
  uint64_t next_generation() { return ++generation_; }

 private:
  class Output;
  struct Worker {
    std::unique_ptr<JobMemory> memory;
    std::unique_ptr<ThreadPool> pool;
    std::unique_ptr<Engine> engine;
    DeviceShard* device = nullptr;
  };
  struct Region {
    internal::v1::WorkerRegion::Kind kind;
    uint32_t index;
    uint32_t only_worker;  // kEvery: all
    bool by_island;        // index is an island
    uint64_t bytes;
    UniqueFd fd;
  };
  static constexpr uint32_t kEvery = ~uint32_t{0};

  MappedRegion AddRegion(internal::v1::WorkerRegion::Kind kind, uint32_t index, uint64_t bytes,
                         uint32_t only_worker = kEvery);
  void CreateRegions();
  void CreateIsland(uint32_t island);
  uint32_t islands() const { return options_.islands ? options_.workers : 1; }
  uint32_t island_of(uint32_t worker) const { return options_.islands ? worker : 0; }
  absl::Status StartWorker(uint32_t w, bool recover);
  NvmeTierOptions TierOptions(uint32_t w) const;
  std::unique_ptr<NvmeTier> OpenTier(uint32_t w);
  absl::StatusOr<std::unique_ptr<DeviceShard>> OpenDevice(uint32_t w);
  void StartProcess(bool recover);
  void SendMade(int socket);
  void ReceiveMade(int socket);
  uint32_t home(uint32_t rank) const { return rank % options_.workers; }

  LocalJobOptions options_;
  std::unique_ptr<Layout> layout_;
  std::vector<Region> regions_;
  std::vector<UniqueFd> doorbells_;
  std::vector<MappedRegion> gradient_windows_;
  std::vector<MappedRegion> rank_pages_;
  std::vector<MappedRegion> windows_;  // by island
  std::unique_ptr<LoopbackMesh> mesh_;
  ManualClock clock_;
  std::unique_ptr<Output> output_;
  std::vector<Worker> workers_;
  std::map<uint32_t, std::vector<trainer::v1::Failure>> failures_;
  std::map<uint32_t, trainer::v1::HelloReply> hellos_;
  std::vector<internal::v1::FromWorker> reports_;
  std::vector<uint64_t> next_id_;
  std::vector<std::map<uint64_t, trainer::v1::SessionRequest>> sent_;  // by rank
  std::vector<uint64_t> rank_generation_;
  uint64_t generation_ = 0;
  std::optional<TierResume> resume_;
  // By worker: device memory that it has made, as a server keeps it.
  std::vector<std::vector<DeviceShard::Made>> made_;
  bool was_started_ = false;  // of RunProcess
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_FAKES_LOCAL_JOB_H_
