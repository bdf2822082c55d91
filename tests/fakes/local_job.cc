#include "tests/fakes/local_job.h"

#include <sys/eventfd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "storage/layout_proto.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;

constexpr uint64_t kJobId = 0x5eed;
constexpr int kMaxRounds = 10000;
constexpr uint64_t kManifestExtra = 32 << 10;

template <typename T>
T Must(absl::StatusOr<T> value) {
  ZS_CHECK(value.ok(), std::string(value.status().message()));
  return *std::move(value);
}

void Must(const absl::Status& status) { ZS_CHECK(status.ok(), std::string(status.message())); }

}  // namespace

class LocalJob::Output final : public EngineOutput {
 public:
  explicit Output(LocalJob& job) : job_(job) {}
  void ToRank(uint32_t rank, const trainer::v1::Failure& failure) override {
    job_.failures_[rank].push_back(failure);
  }
  void ToRank(uint32_t rank, const trainer::v1::HelloReply& reply) override {
    job_.hellos_[rank] = reply;
  }
  void ToServer(const internal::v1::FromWorker& message) override {
    job_.reports_.push_back(message);
  }

 private:
  LocalJob& job_;
};

model::v1::Manifest MakeManifest(const std::vector<uint64_t>& sizes, model::v1::DType dtype) {
  model::v1::Manifest manifest;
  manifest.add_groups();
  for (size_t i = 0; i < sizes.size(); ++i) {
    model::v1::Parameter& parameter = *manifest.add_parameters();
    parameter.set_name(absl::StrCat("p", i));
    parameter.set_module(absl::StrCat("m", i));
    parameter.add_shape(sizes[i]);
    parameter.set_dtype(dtype);
    parameter.set_trainable(true);
  }
  return manifest;
}

model::v1::EngineConfig MakeConfig(uint32_t stage, uint32_t ranks, model::v1::DType dtype) {
  model::v1::EngineConfig config;
  config.set_stage(stage);
  config.set_compute_dtype(dtype);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
  config.set_optimizer(model::v1::OPTIMIZER_ADAMW);
  config.add_state_slots("exp_avg");
  config.add_state_slots("exp_avg_sq");
  config.set_world_size(ranks);
  config.set_accumulation_steps(1);
  config.set_reduction_group(ranks);
  config.set_window(model::v1::WINDOW_IN_PLACE);
  config.set_transport(model::v1::TRANSPORT_SHARED_MEMORY);
  config.mutable_loss_scale()->set_initial(1.0);
  config.set_reduce_bucket_elements(1 << 20);
  config.set_user_state_bytes(4096);
  config.set_skip_on_overflow(true);
  return config;
}

void UseNvme(model::v1::EngineConfig& config, double ratio, bool parameters) {
  config.set_tiered(true);
  config.set_optimizer_tier(ratio > 0 ? model::v1::TIER_NVME : model::v1::TIER_HOST);
  config.set_optimizer_ratio(ratio);
  config.set_parameter_tier(parameters ? model::v1::TIER_NVME : model::v1::TIER_HOST);
  model::v1::NvmeConfig& nvme = *config.mutable_nvme();
  nvme.set_block_bytes(64 << 10);
  nvme.set_queue_depth(4);
  nvme.set_threads(2);
  nvme.set_overlap_events(true);
  nvme.set_buffer_count(2);
  nvme.set_pipeline_read(true);
  nvme.set_pipeline_write(true);
  nvme.set_spares(2);
}

LocalJob::LocalJob(LocalJobOptions options)
    : options_(std::move(options)),
      mesh_(std::make_unique<LoopbackMesh>(options_.workers)),
      output_(std::make_unique<Output>(*this)),
      workers_(options_.workers),
      next_id_(ranks(), 0),
      sent_(ranks()),
      rank_generation_(ranks(), 0),
      made_(options_.workers) {
  layout_ = std::make_unique<Layout>(Must(LayoutFromProto(options_.manifest, options_.workers)));
  CreateRegions();
  if (options_.in_processes) return;
  if (options_.resume) {
    const ManifestState state = Must(Resumable(options_));
    // Above what any worker has seen.
    resume_ = TierResume{state, state.attempt + 1000};
  }
  for (uint32_t w = 0; w < options_.workers; ++w) Must(StartWorker(w, false));
  resume_.reset();
  for (uint32_t rank = 0; rank < ranks(); ++rank) Hello(rank, false);
  Run();
}

LocalJob::~LocalJob() = default;

MappedRegion LocalJob::AddRegion(WorkerRegion::Kind kind, uint32_t index, uint64_t bytes,
                                 uint32_t only_worker) {
  const uint64_t pages = (bytes + 4095) / 4096 * 4096;
  const bool by_island = kind == WorkerRegion::KIND_BOARD ||
                         kind == WorkerRegion::KIND_USER_STATE ||
                         kind == WorkerRegion::KIND_PARAMETER_WINDOW;
  regions_.push_back({kind, index, only_worker, by_island, pages,
                      Must(CreateSealedMemfd("zeroshard-test", pages))});
  return Must(MappedRegion::Map(regions_.back().fd.get(), pages, Access::kReadWrite));
}

void LocalJob::CreateIsland(uint32_t island) {
  const model::v1::EngineConfig& config = options_.config;
  const BoardShape shape{options_.workers, ranks(), static_cast<uint32_t>(layout_->units().size()),
                         static_cast<uint32_t>(layout_->parameters().size())};
  const MappedRegion board = AddRegion(WorkerRegion::KIND_BOARD, island, Board::Bytes(shape));
  Must(Board::Format(board.bytes(), shape, kJobId, layout_->fingerprint(),
                     config.loss_scale().initial(), config.loss_scale().hysteresis())
           .status());
  windows_.push_back(
      AddRegion(WorkerRegion::KIND_PARAMETER_WINDOW, island, layout_->window_bytes()));
  AddRegion(WorkerRegion::KIND_USER_STATE, island,
            UserStates::Bytes(ranks(), config.user_state_bytes()));
}

void LocalJob::CreateRegions() {
  const model::v1::EngineConfig& config = options_.config;
  for (uint32_t island = 0; island < islands(); ++island) CreateIsland(island);
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    gradient_windows_.push_back(
        AddRegion(WorkerRegion::KIND_GRADIENT_WINDOW, rank,
                  GradientWindowBytes(*layout_, config) + ParameterRingBytes(*layout_, config)));
    rank_pages_.push_back(
        AddRegion(WorkerRegion::KIND_RANK_PAGE, rank, sizeof(RankPage), home(rank)));
    if (!UsesLocalAccumulators(config)) continue;
    const PartitionPlan plan = Must(PartitionPlan::CreateLocal(*layout_, config, options_.lanes));
    AddRegion(WorkerRegion::KIND_LOCAL_ACCUMULATOR, rank, plan.bytes());
  }
  for (uint32_t w = 0; w < options_.workers; ++w) {
    const PartitionPlan plan = Must(PartitionPlan::Create(*layout_, config, w, options_.lanes));
    AddRegion(WorkerRegion::KIND_PARTITION, w, plan.bytes(), w);
    if (NvmePlan::Exists(config)) {
      const std::vector<uint64_t> weights(options_.nvme_paths.size(), 1);
      AddRegion(WorkerRegion::KIND_SLOT_TABLE, w,
                Must(NvmePlan::Create(*layout_, plan, config, weights)).table_bytes(), w);
    }
    if (DevicePlan::Exists(config)) {
      const DevicePlan device = Must(DevicePlan::Create(*layout_, plan, config));
      AddRegion(WorkerRegion::KIND_DEVICE_TABLE, w, device.table_bytes(), w);
      AddRegion(WorkerRegion::KIND_DEVICE_COUNTERS, w, kDeviceCounterBytes, w);
      if (MirrorPlan::Exists(config)) {
        AddRegion(WorkerRegion::KIND_DEVICE_MIRROR, w,
                  MirrorPlan::Create(*layout_, plan, device, config).bytes(), w);
      }
    }
    doorbells_.emplace_back(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  }
}

absl::Status LocalJob::StartWorker(uint32_t w, bool recover) {
  internal::v1::WorkerStart start;
  std::vector<UniqueFd> fds;
  start.set_job("local");
  start.set_job_id(kJobId);
  start.set_worker(w);
  start.set_workers(options_.workers);
  *start.mutable_config() = options_.config;
  *start.mutable_manifest() = options_.manifest;
  start.set_layout_fingerprint(layout_->fingerprint());
  start.set_lanes(options_.lanes);
  start.set_recover(recover);
  for (const std::string& path : options_.nvme_paths) {
    start.add_nvme_paths()->set_path(path);
    start.mutable_nvme_paths()->rbegin()->set_weight(1);
  }
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    internal::v1::RankPlace& place = *start.add_ranks();
    place.set_home_worker(home(rank));
    place.set_island(island_of(home(rank)));
  }
  for (uint32_t i = 0; i < options_.workers; ++i)
    start.add_worker_places()->set_island(island_of(i));
  auto add = [&](WorkerRegion::Kind kind, uint32_t index, uint64_t bytes, const UniqueFd& fd) {
    WorkerRegion& region = *start.add_regions();
    region.set_kind(kind);
    region.set_index(index);
    region.set_bytes(bytes);
    fds.push_back(Must(fd.Duplicate()));
  };
  for (const Region& region : regions_) {
    if (region.only_worker != kEvery && region.only_worker != w) continue;
    if (region.by_island && region.index != island_of(w)) continue;
    add(region.kind, region.index, region.bytes, region.fd);
  }
  for (uint32_t i = 0; i < options_.workers; ++i) {
    if (island_of(i) == island_of(w)) add(WorkerRegion::KIND_DOORBELL, i, 0, doorbells_[i]);
  }
  for (const DeviceShard::Made& made : made_[w]) add(made.kind, w, made.bytes, made.fd);
  start.mutable_device()->set_ordinal(w);
  StopWorker(w);
  Worker& worker = workers_[w];
  worker.memory = Must(JobMemory::Create(std::move(start), std::move(fds)));
  worker.pool = Must(ThreadPool::Create({.threads = static_cast<int>(options_.lanes)}));
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<DeviceShard> device, OpenDevice(w));
  worker.device = device.get();
  worker.engine = Must(Engine::Create(*worker.memory, *worker.pool, clock_, *output_, OpenTier(w),
                                      std::move(device)));
  if (options_.islands) Must(worker.engine->Connect(mesh_->end(w)));
  if (recover) Must(worker.engine->Recover().status());
  if (resume_.has_value()) Must(worker.engine->Resume(resume_->committed));
  return absl::OkStatus();
}

void LocalJob::StopWorker(uint32_t w) {
  workers_[w].engine.reset();  // its device uses the memory
  workers_[w] = {};
}

absl::Status LocalJob::TryStartWorker(uint32_t w) { return StartWorker(w, true); }

absl::StatusOr<ManifestState> LocalJob::Resumable(const LocalJobOptions& options) {
  const Layout layout = Must(LayoutFromProto(options.manifest, options.workers));
  std::vector<std::vector<ManifestState>> states;
  for (uint32_t w = 0; w < options.workers; ++w) {
    const PartitionPlan partition =
        Must(PartitionPlan::Create(layout, options.config, w, options.lanes));
    const std::vector<uint64_t> weights(options.nvme_paths.size(), 1);
    const NvmePlan plan = Must(NvmePlan::Create(layout, partition, options.config, weights));
    NvmeTierOptions tier;
    tier.job_id = kJobId;
    tier.layout_fingerprint = layout.fingerprint();
    tier.worker = w;
    tier.config = options.config.nvme();
    tier.manifest_extra = kManifestExtra;
    for (const std::string& path : options.nvme_paths) tier.paths.push_back({.path = path});
    absl::StatusOr<TierRemains> remains = NvmeTier::Inspect(plan, tier);
    if (!remains.ok()) return remains.status();
    states.push_back(remains->states);
  }
  return ChooseState(states);
}

NvmeTierOptions LocalJob::TierOptions(uint32_t w) const {
  const JobMemory& memory = *workers_[w].memory;
  NvmeTierOptions options;
  options.one_lane_bytes = w % 2 == 0 ? 0 : options.one_lane_bytes;  // both ways of sharing work
  options.job = "local";
  options.job_id = kJobId;
  options.layout_fingerprint = layout_->fingerprint();
  options.worker = w;
  options.config = memory.config().nvme();
  for (const std::string& path : options_.nvme_paths) options.paths.push_back({.path = path});
  options.table = memory.slot_table();
  options.recover = memory.start().recover();
  options.committed = memory.board().committed_attempt();
  options.resume = resume_;
  options.manifest_extra = kManifestExtra;
  options.pool = workers_[w].pool.get();
  if (options_.make_queue) {
    options.make_queue = [this, w](IoBackend, const IoQueueOptions& queue) {
      return options_.make_queue(w, queue);
    };
  }
  return options;
}

std::unique_ptr<NvmeTier> LocalJob::OpenTier(uint32_t w) {
  const JobMemory& memory = *workers_[w].memory;
  if (memory.nvme_plan() == nullptr) return nullptr;
  return Must(NvmeTier::Open(*memory.nvme_plan(), TierOptions(w)));
}

absl::StatusOr<std::unique_ptr<DeviceShard>> LocalJob::OpenDevice(uint32_t w) {
  if (!options_.config.data_plane()) return nullptr;
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<DeviceShard> device,
                      options_.open_device(*workers_[w].memory));
  for (DeviceShard::Made& made : device->TakeMade()) made_[w].push_back(std::move(made));
  return device;
}

void LocalJob::RestartWorker(uint32_t w) {
  Must(StartWorker(w, true));
  if (options_.islands) BreakMesh();
}

void LocalJob::BreakMesh() {
  mesh_->Break();
  for (Worker& worker : workers_) {
    if (worker.engine != nullptr) worker.engine->OnMeshConnected();
  }
}

void LocalJob::RunWorker(uint32_t w) {
  for (auto& [peer, frame] : mesh_->Take(w))
    workers_[w].engine->OnMeshFrame(peer, std::move(frame));
  workers_[w].engine->Advance();
}

void LocalJob::RunWorkerWithFrames(uint32_t w, uint32_t peer) {
  for (Frame& frame : mesh_->TakeFrom(w, peer)) {
    workers_[w].engine->OnMeshFrame(peer, std::move(frame));
  }
  workers_[w].engine->Advance();
}

void LocalJob::Run() {
  for (int round = 0; round < kMaxRounds; ++round) {
    bool rang = false;
    for (uint32_t w = 0; w < options_.workers; ++w) {
      for (auto& [peer, frame] : mesh_->Take(w)) {
        workers_[w].engine->OnMeshFrame(peer, std::move(frame));
        rang = true;
      }
      workers_[w].engine->Advance();
    }
    for (const UniqueFd& doorbell : doorbells_) {
      eventfd_t count = 0;
      rang |= eventfd_read(doorbell.get(), &count) == 0;
    }
    for (const Worker& worker : workers_) {
      if (rang || worker.device == nullptr) continue;
      const auto before = worker.device->LastMirror();
      Must(worker.device->FinishMirror());
      rang |= worker.device->LastMirror() != before;
    }
    if (!rang) return;
  }
  ZS_CHECK(false, "the job does not come to rest");
}

void LocalJob::RunMoves() {
  for (int round = 0; round < kMaxRounds; ++round) {
    bool moving = false;
    for (Worker& worker : workers_) {
      worker.engine->MoveStates();
      moving |= worker.engine->IsMoving();
    }
    if (!moving) return;
    clock_.Advance(absl::Seconds(1));
  }
  ZS_CHECK(false, "states move without end");
}

}  // namespace zeroshard
