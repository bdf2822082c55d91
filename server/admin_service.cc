// The admin API (proto/admin.proto).
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/version.h"
#include "proto/admin.grpc.pb.h"
#include "server/ds_config.h"
#include "server/grpc_status.h"
#include "server/node_gpus.h"
#include "server/services.h"

namespace zeroshard {
namespace {

using namespace admin::v1;  // NOLINT(google-build-using-namespace): the messages of this API

constexpr absl::Duration kDrivePatience = absl::Seconds(2);

absl::StatusOr<ResolveConfigReply> Resolve(const ResolveConfigRequest& request,
                                           DeviceKind devices) {
  const ClientValues client(request.overrides().begin(), request.overrides().end());
  ZS_ASSIGN_OR_RETURN(const DsConfig config, ParseDsConfig(request.ds_config(), client, devices));
  ResolveConfigReply reply;
  for (const ResolvedValue& value : config.resolved) {
    ConfigValue& out = *reply.add_values();
    out.set_key(value.path);
    out.set_value(value.value_text);
    out.set_origin(std::string(ValueOriginName(value.origin)));
    out.set_note(value.note);
  }
  for (const std::string& warning : config.warnings) reply.add_warnings(warning);
  if (request.world_size() == 0) return reply;
  ZS_ASSIGN_OR_RETURN(const Batch batch, ResolveBatch(config.batch, request.world_size()));
  auto add = [&](const char* key, int64_t number) {
    ConfigValue& out = *reply.add_values();
    out.set_key(key);
    out.set_value(std::to_string(number));
    out.set_origin("derived");
    out.set_note("train = micro * accumulation * " + std::to_string(request.world_size()) +
                 " ranks");
  };
  add("batch.train", batch.train);
  add("batch.micro", batch.micro);
  add("batch.accumulation", batch.accumulation);
  return reply;
}

class AdminService final : public Admin::Service {
 public:
  explicit AdminService(const ServiceContext* context) : context_(*context) {}

  grpc::Status GetStatus(grpc::ServerContext*, const GetStatusRequest*,
                         GetStatusReply* reply) override;
  grpc::Status ListJobs(grpc::ServerContext*, const ListJobsRequest*,
                        ListJobsReply* reply) override;
  grpc::Status GetJob(grpc::ServerContext*, const GetJobRequest* request,
                      GetJobReply* reply) override;
  grpc::Status ListTiers(grpc::ServerContext*, const ListTiersRequest*,
                         ListTiersReply* reply) override;
  grpc::Status RemoveJob(grpc::ServerContext*, const RemoveJobRequest* request,
                         RemoveJobReply* reply) override;
  grpc::Status ListNvmeFiles(grpc::ServerContext*, const ListNvmeFilesRequest* request,
                             ListNvmeFilesReply* reply) override;
  grpc::Status MoveStates(grpc::ServerContext*, const MoveStatesRequest* request,
                          MoveStatesReply* reply) override {
    return Decided(
        [this, request]() -> absl::StatusOr<MoveStatesReply> {
          ZS_ASSIGN_OR_RETURN(JobHost* const job, context_.table->Find(request->job()));
          return job->MoveStates(*request);
        },
        reply);
  }
  grpc::Status ResolveConfig(grpc::ServerContext*, const ResolveConfigRequest* request,
                             ResolveConfigReply* reply) override {
    return Answer(Resolve(*request, KindOf(context_.config->devices)), reply);
  }

 private:
  template <typename Reply>
  static grpc::Status Answer(absl::StatusOr<Reply> result, Reply* reply) {
    if (!result.ok()) return ToGrpc(result.status());
    *reply = *std::move(result);
    return grpc::Status::OK;
  }

  // Runs `fn` on the decision thread and answers with what it returns.
  template <typename Reply, typename Fn>
  grpc::Status Decided(Fn fn, Reply* reply) {
    using Result = absl::StatusOr<Reply>;
    absl::StatusOr<Result> result = context_.loop->Call<Result>([&]() -> Result { return fn(); });
    if (!result.ok()) return ToGrpc(result.status());
    return Answer(*std::move(result), reply);
  }

  void AddGpuTiers(ListTiersReply& tiers) const;
  void AddNvmeTiers(ListTiersReply& tiers) const;

  const ServiceContext context_;
};

grpc::Status AdminService::GetStatus(grpc::ServerContext*, const GetStatusRequest*,
                                     GetStatusReply* reply) {
  const DaemonConfig& config = *context_.config;
  reply->set_version(kVersion);
  reply->set_uptime_seconds(
      static_cast<uint64_t>(absl::ToInt64Seconds(context_.loop->Now() - context_.started_at)));
  reply->set_pid(static_cast<uint32_t>(getpid()));
  for (const std::string& device : config.devices) reply->add_devices(device);
  reply->set_state_directory(config.state_dir);
  reply->set_checkpoint_directory(config.checkpoint_dir);
  reply->set_export_directory(config.export_dir);
  reply->set_metrics_address(context_.metrics_address);
  reply->set_jobs(context_.table->count());
  return grpc::Status::OK;
}

grpc::Status AdminService::ListJobs(grpc::ServerContext*, const ListJobsRequest*,
                                    ListJobsReply* reply) {
  return Decided(
      [this]() -> absl::StatusOr<ListJobsReply> {
        ListJobsReply jobs;
        for (const JobSummary& summary : context_.table->Summaries()) *jobs.add_jobs() = summary;
        for (const JobSummary& lost : context_.table->Resumable()) *jobs.add_jobs() = lost;
        return jobs;
      },
      reply);
}

grpc::Status AdminService::GetJob(grpc::ServerContext*, const GetJobRequest* request,
                                  GetJobReply* reply) {
  return Decided(
      [this, request]() -> absl::StatusOr<GetJobReply> {
        ZS_ASSIGN_OR_RETURN(JobHost* const job, context_.table->Find(request->name()));
        return job->View();
      },
      reply);
}

// On the decision thread.
void AdminService::AddGpuTiers(ListTiersReply& tiers) const {
  if (context_.gpus == nullptr) return;
  const std::map<std::string, uint64_t> in_use = context_.table->GpuInUse("");
  for (const Gpu& gpu : context_.gpus->gpus()) {
    Tier& tier = *tiers.add_tiers();
    const auto it = in_use.find(gpu.device);
    const uint64_t used = it == in_use.end() ? 0 : it->second;
    const uint64_t capacity = context_.gpus->Capacity(gpu);
    const uint64_t left = capacity - std::min(capacity, used);
    tier.set_name("gpu " + gpu.device);
    tier.set_capacity_bytes(capacity);
    tier.set_used_bytes(used);
    tier.set_free_bytes(std::min(left, context_.gpus->Free(gpu.device).value_or(left)));
    tier.set_note(gpu.name + (context_.gpus->limit() == 0 ? "" : ", bounded by gpu_memory_limit"));
  }
}

void AdminService::AddNvmeTiers(ListTiersReply& tiers) const {
  const uint64_t limit = context_.config->tiers.nvme_limit;
  for (const NvmeStore::PathView& path : context_.nvme->Paths()) {
    Tier& tier = *tiers.add_tiers();
    tier.set_name("nvme " + path.path);
    tier.set_capacity_bytes(path.space.capacity);
    tier.set_used_bytes(path.promised);
    const uint64_t room = path.space.free + path.space.occupied;
    tier.set_free_bytes(room - std::min(room, path.promised));
    tier.set_note(path.filesystem + ", " + path.backend +
                  (path.direct ? "" : ", through the page cache") +
                  (limit == 0 ? "" : ", nvme_limit of all paths " + HumanBytes(limit)));
  }
}

grpc::Status AdminService::ListTiers(grpc::ServerContext*, const ListTiersRequest*,
                                     ListTiersReply* reply) {
  context_.nvme->Refresh(kDrivePatience);  // on this thread: a drive may be slow
  return Decided(
      [this]() -> absl::StatusOr<ListTiersReply> {
        ZS_ASSIGN_OR_RETURN(const NodeMemory memory, ReadNodeMemory());
        const MemoryInUse in_use = context_.table->InUse("");
        const uint64_t limit = context_.config->host_memory_limit;
        const uint64_t promised = memory.available - std::min(memory.available, in_use.untouched);
        const uint64_t left = limit == 0 ? promised : limit - std::min(limit, in_use.held);
        ListTiersReply tiers;
        Tier& host = *tiers.add_tiers();
        host.set_name("host");
        host.set_capacity_bytes(limit == 0 ? memory.total : std::min(limit, memory.total));
        host.set_used_bytes(in_use.held);
        host.set_free_bytes(std::min(left, promised));
        host.set_note(limit == 0 ? "bounded by " + memory.source : "bounded by host_memory_limit");
        AddGpuTiers(tiers);
        AddNvmeTiers(tiers);
        for (const JobSummary& summary : context_.table->Summaries()) {
          ZS_ASSIGN_OR_RETURN(const JobHost* const job, context_.table->Find(summary.name()));
          admin::v1::TierJob& line = *tiers.add_jobs();
          line.set_name(summary.name());
          line.set_bytes(summary.bytes());
          const GetJobReply view = job->View();
          *line.mutable_config() = view.config();
          line.set_nvme_bytes(job->MemoryHeld() > 0 ? job->plan().nvme_total() : 0);
          const auto states = view.counters().find("nvme_state_bytes");
          if (states != view.counters().end()) line.set_nvme_state_bytes(states->second);
          for (const auto& [device, bytes] : job->GpuHeld()) {
            line.set_gpu_bytes(line.gpu_bytes() + bytes);
          }
          const auto on_gpu = view.counters().find("gpu_state_bytes");
          if (on_gpu != view.counters().end()) line.set_gpu_state_bytes(on_gpu->second);
        }
        return tiers;
      },
      reply);
}

grpc::Status AdminService::ListNvmeFiles(grpc::ServerContext*, const ListNvmeFilesRequest* request,
                                         ListNvmeFilesReply* reply) {
  const absl::StatusOr<std::vector<NvmeStore::FileView>> files = context_.nvme->Files(
      request->remove_stale() ? NvmeStore::Stale::kRemove : NvmeStore::Stale::kKeep);
  if (!files.ok()) return ToGrpc(files.status());
  static constexpr const char* kKinds[] = {"live", "stale", "temporary", "foreign"};
  for (const NvmeStore::FileView& view : *files) {
    admin::v1::NvmeFile& file = *reply->add_files();
    file.set_path(view.path);
    file.set_name(view.file.name);
    file.set_bytes(view.file.bytes);
    file.set_kind(view.removed ? "removed" : kKinds[static_cast<int>(view.file.kind)]);
    file.set_reason(view.file.reason);
    if (view.removed) reply->set_freed_bytes(reply->freed_bytes() + view.file.bytes);
  }
  return grpc::Status::OK;
}

grpc::Status AdminService::RemoveJob(grpc::ServerContext*, const RemoveJobRequest* request,
                                     RemoveJobReply* reply) {
  return Decided(
      [this, request]() -> absl::StatusOr<RemoveJobReply> {
        ZS_ASSIGN_OR_RETURN(const uint64_t bytes,
                            context_.table->Remove(request->name(), request->force()));
        RemoveJobReply removed;
        removed.set_bytes(bytes);
        return removed;
      },
      reply);
}

}  // namespace

std::unique_ptr<grpc::Service> MakeAdminService(const ServiceContext* context) {
  return std::make_unique<AdminService>(context);
}

}  // namespace zeroshard
