#include "server/server.h"

#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/service_type.h>
#include <grpcpp/server_posix.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/metrics_server.h"
#include "base/status.h"
#include "server/cluster_client.h"
#include "server/descriptor_server.h"
#include "server/drive_metrics.h"
#include "server/event_loop.h"
#include "server/metadata_log.h"
#include "server/node_cores.h"
#include "server/node_io.h"
#include "server/nvme_store.h"
#include "server/peer_table.h"
#include "server/power_jobs.h"
#include "server/run_files.h"
#include "server/services.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

// A manifest of many parameters is the largest message; bulk never travels here.
constexpr int kMaxGrpcBytes = 256 << 20;
constexpr absl::Duration kGrpcGrace = absl::Seconds(2);

// A driver that has slept may take long for each GPU.
constexpr absl::Duration kProbeTimeout = absl::Seconds(60);

uint32_t Lanes(const DaemonConfig& config, const NodeCores& cores, const NodeGpus* gpus) {
  if (config.lanes_per_worker > 0) return config.lanes_per_worker;
  if (gpus == nullptr) return cores.LanesFor(config.devices);
  std::vector<std::string> near;  // cores of the GPUs' NUMA nodes
  for (const Gpu& gpu : gpus->gpus()) {
    near.push_back(absl::StrCat("cpu:", gpu.numa_node.value_or(0)));
  }
  return cores.LanesFor(near);
}

absl::Status MakeDirectories(const DaemonConfig& config, RunFiles& files) {
  const mode_t mode = config.allow_uids.empty() ? 0750 : 0755;
  ZS_RETURN_IF_ERROR(files.MakeDirectory("run_dir", config.run_dir, mode));
  ZS_RETURN_IF_ERROR(files.MakeDirectory("run_dir", config.run_dir + "/jobs", mode));
  ZS_RETURN_IF_ERROR(files.MakeDirectory("state_dir", config.state_dir, 0750));
  ZS_RETURN_IF_ERROR(files.MakeDirectory("checkpoint_dir", config.checkpoint_dir, 0750));
  return files.MakeDirectory("export_dir", config.export_dir, 0755);
}

// What an earlier daemon left half-written.
absl::Status RemoveLeftovers(const std::string& path) {
  ZS_ASSIGN_OR_RETURN(const UniqueFd directory, OpenDirectory(path));
  ZS_ASSIGN_OR_RETURN(const int removed, RemoveTemporaries(directory.get()));
  if (removed > 0) {
    LogInfo(absl::StrCat("removed ", removed, " unfinished files of an earlier run from ", path));
  }
  return absl::OkStatus();
}

}  // namespace

// In order of construction; destroyed the other way round.
struct Server::Parts {
  DaemonConfig config;
  std::unique_ptr<NodeGpus> gpus;  // null where the devices are the host's
  SystemClock clock;
  std::unique_ptr<NvmeStore> nvme;  // outlives the jobs, whose files it removes
  std::unique_ptr<NodeIo> io;       // outlives the loop, as cores does
  std::unique_ptr<DriveMetrics> drives;
  std::unique_ptr<NodeCores> cores;  // outlives the loop, whose timers hold workers' numbers
  std::unique_ptr<EventLoop> loop;
  std::shared_ptr<MetricsTable> metrics_table = std::make_shared<MetricsTable>();
  JobMetrics metrics{metrics_table};
  std::unique_ptr<MetricsServer> metrics_server;
  std::string metrics_address;
  RunFiles files;
  std::string socket_path;
  UniqueFd listener;
  std::unique_ptr<MetadataLog> journal;
  PowerJobs power;
  PeerTable peers;
  std::unique_ptr<ClusterClient> cluster;
  std::unique_ptr<JobTable> table;
  std::unique_ptr<DescriptorServer> descriptors;
  std::unique_ptr<CheckpointOps> checkpoints;
  ServiceContext context;
  std::unique_ptr<grpc::Service> trainer_service;
  std::unique_ptr<grpc::Service> admin_service;
  std::unique_ptr<grpc::Service> health_service;
  std::unique_ptr<grpc::Service> cluster_service;
  std::unique_ptr<grpc::Server> grpc;
  std::unique_ptr<grpc::Server> cluster_grpc;  // null where no cluster is configured
  bool stopping = false;

  absl::Status StartMetrics();
  absl::Status StartFiles(UniqueFd& descriptor_listener);
  absl::Status StartJobs(UniqueFd descriptor_listener, const std::string& worker_binary);
  absl::Status StartTiers(HostEnvironment& environment);
  void FindPowerJobs();
  absl::Status StartGrpc();
  absl::Status StartCluster();
  void StopGrpc();
  void OnConnection();
  void BeginShutdown();
};

absl::Status Server::Parts::StartMetrics() {
  if (config.metrics_address == "off") return absl::OkStatus();
  MetricsServer::Options options;
  options.address = config.metrics_address;
  absl::StatusOr<std::unique_ptr<MetricsServer>> started =
      MetricsServer::Start(metrics_table, options);
  if (!started.ok()) return Annotate(started.status(), "metrics_address");
  metrics_server = *std::move(started);
  const std::string host = config.metrics_address.substr(0, config.metrics_address.rfind(':'));
  metrics_address = absl::StrCat(host, ":", metrics_server->port());
  return absl::OkStatus();
}

absl::Status Server::Parts::StartFiles(UniqueFd& descriptor_listener) {
  ZS_RETURN_IF_ERROR(MakeDirectories(config, files));
  const mode_t mode = config.allow_uids.empty() ? 0660 : 0666;
  socket_path = config.run_dir + "/zeroshardd.sock";
  ZS_ASSIGN_OR_RETURN(listener, files.Listen(socket_path, mode, UnixSocketType::kStream));
  ZS_ASSIGN_OR_RETURN(descriptor_listener, files.Listen(config.run_dir + "/descriptors.sock", mode,
                                                        UnixSocketType::kSeqpacket));
  ZS_ASSIGN_OR_RETURN(journal, MetadataLog::Open(config.state_dir));
  for (const std::string& job : journal->lost_jobs()) {
    LogWarn(absl::StrCat("job ", job, " of an earlier daemon is gone: its memory ended with that ",
                         "daemon; attach again and restore its last checkpoint"));
  }
  ZS_RETURN_IF_ERROR(RemoveLeftovers(config.checkpoint_dir));
  return RemoveLeftovers(config.export_dir);
}

absl::Status Server::Parts::StartTiers(HostEnvironment& environment) {
  NodeIo::Options shares;
  shares.limits.bytes_per_second = config.tiers.io_bytes_per_second;
  shares.limits.depth = config.tiers.io_depth;
  shares.limits.write_budget = config.tiers.nvme_write_budget;
  shares.state_dir = config.state_dir;
  ZS_ASSIGN_OR_RETURN(io, NodeIo::Create(&clock, shares));
  environment.io = io.get();
  for (const NvmePathConfig& path : config.tiers.nvme_paths) {
    ZS_RETURN_IF_ERROR(io->AddPath(path.path).status());
  }
  drives = std::make_unique<DriveMetrics>(metrics_table, io->budget());
  environment.drives = drives.get();
  NvmeStore::Options paths;
  paths.backend = config.tiers.io_backend;
  paths.limit = config.tiers.nvme_limit;
  nvme = std::make_unique<NvmeStore>(paths);
  nvme->Open(config.tiers.nvme_paths, journal->ended_power_jobs());
  environment.nvme = nvme.get();
  FindPowerJobs();
  environment.power = &power;
  return absl::OkStatus();
}

absl::Status Server::Parts::StartJobs(UniqueFd descriptor_listener,
                                      const std::string& worker_binary) {
  HostEnvironment environment;
  environment.loop = loop.get();
  environment.config = &config;
  environment.metrics = &metrics;
  ZS_ASSIGN_OR_RETURN(cores, NodeCores::Create());
  environment.cores = cores.get();
  environment.gpus = gpus.get();
  ZS_RETURN_IF_ERROR(StartTiers(environment));
  if (!config.cluster.alone()) {
    cluster = MakeClusterClient(config.cluster, loop.get());
    environment.cluster = cluster.get();
  }
  environment.worker_binary = worker_binary;
  environment.descriptor_socket = config.run_dir + "/descriptors.sock";
  environment.journal = [this](records::v1::JournalRecord record) {
    journal->Append(std::move(record));
  };
  table = std::make_unique<JobTable>(environment);
  table->StartMetrics();
  descriptors = std::make_unique<DescriptorServer>(
      loop.get(), table.get(), std::move(descriptor_listener), config.allow_uids);
  ZS_RETURN_IF_ERROR(descriptors->Start());
  CheckpointOps::Environment operations;
  operations.loop = loop.get();
  operations.table = table.get();
  operations.config = &config;
  operations.metrics = &metrics;
  operations.journal = environment.journal;
  checkpoints = std::make_unique<CheckpointOps>(operations);
  return absl::OkStatus();
}

void Server::Parts::FindPowerJobs() {
  for (const records::v1::JobCreated& job : journal->power_jobs()) {
    LogInfo(absl::StrCat("job ", job.job(), " of an earlier daemon can be resumed: its states are ",
                         "on nvme; attach under its name, with the same parameters"));
    power.Put(job.job(), {.job_id = job.job_id(), .facts = job.power()});
  }
  for (const uint64_t job_id : nvme->kept()) {
    if (power.HasId(job_id)) continue;
    const std::string name = absl::StrCat("job-", absl::Hex(job_id, absl::kZeroPad16));
    LogWarn(absl::StrCat(name,
                         " has states on nvme, and the journal does not know whose they are; ",
                         "they are kept: `zeroshard remove ", name, "` deletes them"));
    power.Put(name, {.job_id = job_id, .facts = {}, .known = false});
  }
}

absl::Status Server::Parts::StartGrpc() {
  context.loop = loop.get();
  context.table = table.get();
  context.peers = &peers;
  context.checkpoints = checkpoints.get();
  context.nvme = nvme.get();
  context.gpus = gpus.get();
  context.config = &config;
  context.lanes = Lanes(config, *cores, gpus.get());
  context.started_at = loop->Now();
  context.metrics_address = metrics_address;
  trainer_service = MakeTrainerService(&context);
  admin_service = MakeAdminService(&context);
  health_service = MakeHealthService(&context);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxGrpcBytes);
  builder.SetMaxSendMessageSize(kMaxGrpcBytes);
  builder.RegisterService(trainer_service.get());
  builder.RegisterService(admin_service.get());
  builder.RegisterService(health_service.get());
  grpc = builder.BuildAndStart();
  if (grpc == nullptr) return absl::InternalError("gRPC did not start");
  ZS_RETURN_IF_ERROR(StartCluster());
  return loop->Watch(listener.get(), [this] { OnConnection(); });
}

// A server of its own: over the network there are other daemons only, no trainers or operators.
absl::Status Server::Parts::StartCluster() {
  if (config.cluster.alone()) return absl::OkStatus();
  const std::string& address = config.cluster.addresses[config.cluster.node];
  ZS_ASSIGN_OR_RETURN(const std::string host, HostOf(address));
  cluster_service = MakeClusterService(&context);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxGrpcBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(cluster_service.get());
  cluster_grpc = builder.BuildAndStart();
  if (cluster_grpc == nullptr) {
    return absl::UnavailableError(absl::StrCat("cluster.addresses: cannot listen on ", address,
                                               ": it is in use, or none of this host's"));
  }
  if (!IsLoopback(host)) {
    LogWarn(absl::StrCat("daemons talk at ", address, " without encryption or authentication: ",
                         "whoever reaches that port can take part in jobs"));
  }
  return absl::OkStatus();
}

void Server::Parts::StopGrpc() {
  const auto deadline = std::chrono::system_clock::now() + absl::ToChronoSeconds(kGrpcGrace);
  if (cluster_grpc != nullptr) cluster_grpc->Shutdown(deadline);
  grpc->Shutdown(deadline);
  grpc->Wait();
}

void Server::Parts::OnConnection() {
  absl::StatusOr<UniqueFd> socket = AcceptUnix(listener.get(), absl::ZeroDuration());
  if (!socket.ok()) return;
  const absl::StatusOr<PeerCredentials> credentials = GetPeerCredentials(socket->get());
  if (!credentials.ok()) return;
  if (absl::Status allowed = CheckUser(credentials->uid, config.allow_uids); !allowed.ok()) {
    LogWarn(absl::StrCat("refused process ", credentials->pid, ": ", allowed.message()));
    return;
  }
  Peer peer;
  peer.pid = credentials->pid;
  peer.uid = credentials->uid;
  absl::StatusOr<UniqueFd> pidfd = OpenPidfd(credentials->pid);
  if (!pidfd.ok()) {
    LogWarn(absl::StrCat("refused a connection whose process cannot be watched: ",
                         pidfd.status().message()));
    return;
  }
  peer.pidfd = *std::move(pidfd);
  const int fd = socket->release();
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  peers.Set(fd, std::move(peer));
  grpc::AddInsecureChannelFromFd(grpc.get(), fd);
}

void Server::Parts::BeginShutdown() {
  if (std::exchange(stopping, true)) return;
  LogInfo("shutting down: ending all jobs");
  loop->Unwatch(listener.get());
  descriptors.reset();
  table->Shutdown([this] { loop->Stop(); });
}

Server::Server(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Server::~Server() = default;

absl::StatusOr<std::unique_ptr<NodeGpus>> FindGpus(const DaemonConfig& config) {
  if (KindOf(config.devices) != DeviceKind::kCuda) return nullptr;
  ZS_ASSIGN_OR_RETURN(const std::string worker_binary, FindWorkerBinary(config.worker_binary));
  absl::StatusOr<std::vector<Gpu>> found = ProbeGpus(worker_binary, kProbeTimeout);
  if (!found.ok()) return Annotate(found.status(), absl::StrCat("devices: ", config.devices[0]));
  return NodeGpus::Create(config.devices, config.gpu_memory_limit, *std::move(found));
}

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const DaemonConfig& config,
                                                       std::unique_ptr<NodeGpus> gpus) {
  ZS_ASSIGN_OR_RETURN(const std::string worker_binary, FindWorkerBinary(config.worker_binary));
  auto parts = std::make_unique<Parts>();
  parts->config = config;
  parts->gpus = std::move(gpus);
  if (parts->gpus != nullptr) {
    parts->config.devices = parts->gpus->devices();
    for (const Gpu& gpu : parts->gpus->gpus()) {
      LogInfo(absl::StrCat(DescribeGpu(gpu), ": ", HumanBytes(gpu.total_bytes)));
    }
  }
  ZS_ASSIGN_OR_RETURN(parts->loop, EventLoop::Create(&parts->clock));
  UniqueFd descriptor_listener;
  ZS_RETURN_IF_ERROR(parts->StartMetrics());
  ZS_RETURN_IF_ERROR(parts->StartFiles(descriptor_listener));
  ZS_RETURN_IF_ERROR(parts->StartJobs(std::move(descriptor_listener), worker_binary));
  ZS_RETURN_IF_ERROR(parts->StartGrpc());
  return std::unique_ptr<Server>(new Server(std::move(parts)));
}

void Server::Run(int shutdown_fd) {
  Parts& parts = *parts_;
  const absl::Status watched = parts.loop->Watch(shutdown_fd, [this, shutdown_fd] {
    parts_->loop->Unwatch(shutdown_fd);
    parts_->BeginShutdown();
  });
  if (!watched.ok()) LogError(absl::StrCat("signals: ", watched.message()));
  LogInfo(absl::StrCat("serving at ", parts.socket_path,
                       parts.metrics_address.empty() ? "" : ", metrics at ",
                       parts.metrics_address));
  parts.loop->Run();
  parts.StopGrpc();
  LogInfo("stopped");
}

void Server::Stop() {
  parts_->loop->Post([this] { parts_->BeginShutdown(); });
}

const std::string& Server::socket_path() const { return parts_->socket_path; }
const std::string& Server::metrics_address() const { return parts_->metrics_address; }

}  // namespace zeroshard
