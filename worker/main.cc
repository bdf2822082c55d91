// zeroshard-worker: owns one partition of one job. Started by zeroshardd with its link as
// descriptor 3; its arguments are for the eyes of people, but for those of worker/device_probe.h.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/status.h"
#include "base/version.h"
#include "device/cpu/thread_pool.h"
#include "proto/worker_link.h"
#include "storage/io_budget.h"
#include "transport/gloo_mesh.h"
#include "worker/budget_gate.h"
#include "worker/control_link.h"
#include "worker/control_store.h"
#include "worker/device_open.h"
#include "worker/device_probe.h"
#include "worker/engine.h"
#include "worker/event_queue.h"
#include "worker/job_memory.h"
#include "worker/nvme_tier.h"
#include "worker/session_server.h"
#include "worker/worker_loop.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(30);
// How often a worker that waits for the others of its job says that it lives.
constexpr int kResumePollMs = 50;

// All that must be the same for every worker of a job: they send structs to one another.
std::string Fingerprint(const JobMemory& memory) {
  model::v1::EngineConfig config = memory.config();
  config.clear_collective_timeout_ms();  // each daemon's own
  return absl::StrCat("build ", kVersion, ", layout ", absl::Hex(memory.layout().fingerprint()),
                      ", config ", absl::Hex(Xxh3_64(config.SerializeAsString())), ", manifest ",
                      absl::Hex(Xxh3_64(memory.start().manifest().SerializeAsString())));
}

GlooMeshOptions MeshOptions(const JobMemory& memory) {
  GlooMeshOptions options;
  options.address = memory.start().gloo_address();
  options.rendezvous.worker = memory.worker();
  options.rendezvous.workers = memory.workers();
  options.rendezvous.fingerprint = Fingerprint(memory);
  for (uint32_t worker = 0; worker < memory.workers(); ++worker) {
    const std::string& node = memory.start().worker_places(worker).node();
    options.rendezvous.names.push_back(
        absl::StrCat("worker ", worker, node.empty() ? "" : absl::StrCat(" of ", node)));
  }
  return options;
}

// Threads on the cores of the device's NUMA node, of which as many run at a time as the node has
// cores for.
absl::StatusOr<std::unique_ptr<ThreadPool>> MakePool(const JobMemory& memory) {
  ThreadPoolOptions options;
  options.threads = static_cast<int>(memory.start().lanes());
  options.progress = &memory.beats();
  options.cores = memory.cores();
  if (options.cores.has_value() && options.cores->budget.nodes() > 1) {
    const CoreBudget& budget = options.cores->budget;
    options.cpus = budget.Cpus(budget.NodeOf(options.cores->holder));
    // Also what this thread makes from here on, and memory that it touches first.
    ZS_RETURN_IF_ERROR(BindThisThread(options.cpus));
  }
  return ThreadPool::Create(options);
}

// Null where no budget bounds all of the job's paths.
absl::StatusOr<std::unique_ptr<IoGate>> MakeGate(const JobMemory& memory, const Clock& clock) {
  if (memory.io_budget().empty()) return nullptr;
  ZS_ASSIGN_OR_RETURN(IoBudget budget, IoBudget::Adopt(memory.io_budget(), &clock));
  if (memory.io_holder() >= IoBudget::kMaxHolders) {
    return absl::InvalidArgumentError("no such holder of the I/O budget");
  }
  std::vector<uint32_t> devices;
  for (const internal::v1::NvmePath& path : memory.start().nvme_paths()) {
    const std::optional<uint32_t> device = budget.FindDevice(path.io_device());
    if (!device.has_value()) {
      LogWarn(absl::StrCat("nvme_path ", path.path(), " has no I/O budget: transfers do not wait"));
      return nullptr;
    }
    devices.push_back(*device);
  }
  return std::make_unique<BudgetGate>(
      IoShare{.budget = std::move(budget), .holder = memory.io_holder()}, std::move(devices));
}

absl::StatusOr<NvmeTierOptions> TierOptions(JobMemory& memory, ThreadPool& pool, IoGate* gate) {
  const internal::v1::WorkerStart& start = memory.start();
  NvmeTierOptions options;
  options.job = start.job();
  options.job_id = start.job_id();
  options.layout_fingerprint = memory.layout().fingerprint();
  options.worker = memory.worker();
  options.config = memory.config().nvme();
  for (const internal::v1::NvmePath& path : start.nvme_paths()) {
    options.paths.push_back({path.path(), path.weight(), path.allow_network_path()});
  }
  ZS_ASSIGN_OR_RETURN(options.backend, ParseIoBackend(start.io_backend()));
  if (start.io_timeout_ms() > 0) options.io_timeout = absl::Milliseconds(start.io_timeout_ms());
  options.table = memory.slot_table();
  options.recover = start.recover();
  options.committed = memory.board().committed_attempt();
  options.pool = &pool;
  options.gate = gate;
  options.pin = [&memory](std::span<std::byte> staging) {
    return memory.pins().PinStaging(staging, memory.beats());
  };
  options.beat = [&memory] { memory.beats().fetch_add(1, std::memory_order_relaxed); };
  options.manifest_extra =
      NvmePlan::ManifestExtra(memory.config(), memory.layout().parameters().size());
  return options;
}

// Tells the server what is left of a job whose regions are lost, and learns from it where all of
// its workers go on; nothing when the job begins anew.
absl::StatusOr<std::optional<TierResume>> AskWhereToGoOn(ControlLink& link, const NvmePlan& plan,
                                                         const NvmeTierOptions& options) {
  ZS_ASSIGN_OR_RETURN(const TierRemains remains, NvmeTier::Inspect(plan, options));
  internal::v1::FromWorker message;
  internal::v1::PowerStates& found = *message.mutable_power_states();
  found.set_missing(remains.missing);
  found.set_unused(remains.unused);
  found.set_problem(remains.problem);
  for (const ManifestState& state : remains.states) {
    internal::v1::PowerState& out = *found.add_states();
    out.set_step(state.step);
    out.set_attempt(state.attempt);
    out.set_revision(state.revision);
  }
  ZS_RETURN_IF_ERROR(link.Send(message));
  while (true) {
    options.beat();
    pollfd readable = {link.fd(), POLLIN, 0};
    if (poll(&readable, 1, kResumePollMs) <= 0) continue;
    ZS_ASSIGN_OR_RETURN(const ControlLink::Command command, link.Receive(kStartTimeout));
    if (command.message.has_stop()) return absl::CancelledError("stopped before the job resumed");
    if (!command.message.has_resume()) continue;
    const internal::v1::ResumeJob& resume = command.message.resume();
    if (resume.fresh()) return std::nullopt;
    return TierResume{{resume.state().step(), resume.state().attempt(), resume.state().revision()},
                      resume.committed()};
  }
}

struct OpenedTier {
  std::unique_ptr<NvmeTier> tier;    // null in a job without one
  std::optional<TierResume> resume;  // where it goes on
};

// The first start writes its files whole, which takes a while.
absl::StatusOr<OpenedTier> OpenTier(ControlLink& link, JobMemory& memory, ThreadPool& pool,
                                    IoGate* gate) {
  OpenedTier opened;
  if (memory.nvme_plan() == nullptr) return opened;
  ZS_ASSIGN_OR_RETURN(NvmeTierOptions options, TierOptions(memory, pool, gate));
  if (memory.start().resume() && !options.recover) {
    ZS_ASSIGN_OR_RETURN(opened.resume, AskWhereToGoOn(link, *memory.nvme_plan(), options));
    options.resume = opened.resume;
  }
  ZS_ASSIGN_OR_RETURN(opened.tier, NvmeTier::Open(*memory.nvme_plan(), std::move(options)));
  LogInfo(absl::StrCat("nvme tier job=", memory.start().job(), " worker=", memory.worker(), " ",
                       opened.tier->description()));
  return opened;
}

// Null in a job without a data plane. Memory that was made belongs to the server from here on.
absl::StatusOr<std::unique_ptr<DeviceShard>> OpenDevice(ControlLink& link, JobMemory& memory) {
  if (!memory.config().data_plane()) return nullptr;
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<DeviceShard> device, OpenDeviceShard(memory));
  internal::v1::FromWorker message;
  std::vector<int> fds;
  const std::vector<DeviceShard::Made> made = device->TakeMade();
  for (const DeviceShard::Made& region : made) {
    internal::v1::WorkerRegion& described = *message.mutable_device_regions()->add_regions();
    described.set_kind(region.kind);
    described.set_index(memory.worker());
    described.set_bytes(region.bytes);
    fds.push_back(region.fd.get());
  }
  if (fds.empty()) return device;
  *message.mutable_device_regions()->mutable_device() = device->device();
  ZS_RETURN_IF_ERROR(link.Send(message, fds));
  return device;
}

// What a successor does, or a worker whose job goes on from its files; a sentence about it.
absl::StatusOr<std::string> TakeUp(Engine& engine, const JobMemory& memory,
                                   const std::optional<TierResume>& resume) {
  if (memory.start().recover()) {
    ZS_ASSIGN_OR_RETURN(std::string recovery, engine.Recover());
    engine.OnDropAttempt(memory.start().drop_generation());
    return recovery;
  }
  if (!resume.has_value()) return std::string();
  ZS_RETURN_IF_ERROR(engine.Resume(resume->committed));
  return absl::StrCat("resumed at step ", resume->state.step, " from its nvme paths");
}

// The last words of a worker that cannot go on. Aborted: a device that was lost to this process,
// which may be well in the next one.
void SendFatal(ControlLink& link, const absl::Status& status) {
  LogError(absl::StrCat("worker ends error=\"", status.message(), "\""));
  internal::v1::FromWorker last;
  if (IsMemoryLost(status)) {
    last.mutable_device_lost()->set_message(std::string(status.message()));
  } else {
    last.mutable_fatal()->set_code(static_cast<uint32_t>(status.raw_code()));
    last.mutable_fatal()->set_message(std::string(status.message()));
  }
  link.Send(last).IgnoreError();
}

// A device that is lost cannot be left in order: whoever waits for one that hangs waits for ever.
[[noreturn]] void EndWithoutDevice(ControlLink& link, const absl::Status& status) {
  SendFatal(link, status);
  _exit(EXIT_FAILURE);
}

absl::Status RunWorker(ControlLink& link) {
  ZS_ASSIGN_OR_RETURN(ControlLink::Start start, link.ReceiveStart(kStartTimeout));
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<JobMemory> memory,
                      JobMemory::Create(std::move(start.start), std::move(start.regions)));
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<ThreadPool> pool, MakePool(*memory));
  SystemClock clock;
  EventQueue events(memory->doorbell(memory->worker()));
  WorkerLoop loop(*memory, link, events, clock);
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<IoGate> gate, MakeGate(*memory, clock));
  ZS_ASSIGN_OR_RETURN(OpenedTier opened, OpenTier(link, *memory, *pool, gate.get()));
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<DeviceShard> device, OpenDevice(link, *memory));
  ZS_ASSIGN_OR_RETURN(
      std::unique_ptr<Engine> engine,
      Engine::Create(*memory, *pool, clock, loop, std::move(opened.tier), std::move(device)));
  loop.SetEngine(engine.get());
  // Last made, first gone: the mesh's threads call the loop.
  ControlStore store(link);
  std::unique_ptr<Mesh> mesh;
  if (!memory->one_island()) {
    loop.SetStore(&store);
    ZS_ASSIGN_OR_RETURN(mesh, CreateGlooMesh(MeshOptions(*memory), store, loop));
    ZS_RETURN_IF_ERROR(engine->Connect(*mesh));
  }

  internal::v1::FromWorker ready;
  ZS_ASSIGN_OR_RETURN(*ready.mutable_ready()->mutable_recovery(),
                      TakeUp(*engine, *memory, opened.resume));
  ready.mutable_ready()->set_step(memory->board().numbers().step);
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<SessionServer> sessions,
                      SessionServer::Start(memory->TakeListener(), memory->ranks(), events));
  loop.SetSessions(sessions.get());
  ZS_RETURN_IF_ERROR(link.Send(ready));
  LogInfo(absl::StrCat("worker ready job=", memory->start().job(), " worker=", memory->worker(),
                       " lanes=", pool->lanes(), " recovery=\"", ready.ready().recovery(), "\""));
  absl::Status status = loop.Run();
  if (!engine->health().ok()) EndWithoutDevice(link, engine->health());
  store.Close();
  mesh.reset();
  return status;
}

int Main() {
  // A worker without its server has no one to serve.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  ControlLink link{UniqueFd(kWorkerLinkFd)};
  absl::Status status = ArmFaultPointsFromEnv();
  if (status.ok()) status = RunWorker(link);
  if (status.ok()) return EXIT_SUCCESS;
  SendFatal(link, status);
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace zeroshard

int main(int count, char** arguments) {
  const std::optional<int> answer =
      zeroshard::AnswerProbe({arguments + 1, static_cast<size_t>(count - 1)});
  return answer.has_value() ? *answer : zeroshard::Main();
}
