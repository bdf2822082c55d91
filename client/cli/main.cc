// zeroshard: the operator's command. Talks to the daemon's Unix socket, but for `bench`.
//
// Exit codes: 0 done, 1 the daemon refused or did not answer, 2 wrong usage.
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/config.h"
#include "client/cli/bench_command.h"
#include "client/cli/proto_json.h"
#include "client/cli/text_table.h"
#include "client/cli/views.h"
#include "client/session.h"
#include "proto/admin.grpc.pb.h"
#include "proto/trainer.grpc.pb.h"

namespace zeroshard {
namespace {

using admin::v1::Admin;
using trainer::v1::Trainer;

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr size_t kMaxConfigBytes = 16 << 20;

struct Options {
  std::string socket;
  bool json = false;
  int timeout_seconds = 30;
  std::string job;
  std::string file;
  std::string name;
  bool overwrite = false;
  bool force = false;
  uint32_t world_size = 0;
  std::vector<std::string> sets;  // key=JSON
  std::string state = "optimizer";
  std::string to;
  std::vector<std::string> units;
  std::string rate;  // "200MiB"
  bool wait = false;
  bool remove_stale = false;
};

class Command {
 public:
  explicit Command(const Options& options) : options_(options) {
    const std::string path = options.socket.empty() ? DefaultSocketPath() : options.socket;
    socket_ = path;
    channel_ = grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials());
    admin_ = Admin::NewStub(channel_);
    trainer_ = Trainer::NewStub(channel_);
  }

  int Status() {
    return Run<admin::v1::GetStatusRequest, admin::v1::GetStatusReply>(
        {}, [&](auto* c, auto& q, auto* r) { return admin_->GetStatus(c, q, r); }, StatusText);
  }
  int Jobs() {
    return Run<admin::v1::ListJobsRequest, admin::v1::ListJobsReply>(
        {}, [&](auto* c, auto& q, auto* r) { return admin_->ListJobs(c, q, r); }, JobsText);
  }
  int Job() {
    admin::v1::GetJobRequest request;
    request.set_name(options_.job);
    return Run<admin::v1::GetJobRequest, admin::v1::GetJobReply>(
        request, [&](auto* c, auto& q, auto* r) { return admin_->GetJob(c, q, r); }, JobText);
  }
  int Tiers() {
    return Run<admin::v1::ListTiersRequest, admin::v1::ListTiersReply>(
        {}, [&](auto* c, auto& q, auto* r) { return admin_->ListTiers(c, q, r); }, TiersText);
  }
  int Nvme() {
    admin::v1::ListNvmeFilesRequest request;
    request.set_remove_stale(options_.remove_stale);
    return Run<admin::v1::ListNvmeFilesRequest, admin::v1::ListNvmeFilesReply>(
        request, [&](auto* c, auto& q, auto* r) { return admin_->ListNvmeFiles(c, q, r); },
        NvmeFilesText);
  }
  int Config();
  int Export();
  int Remove();
  int Move();

 private:
  int AwaitMove();
  std::string MoveText(const admin::v1::MoveStatesReply& reply) const;
  template <typename Request, typename Reply>
  int Run(const Request& request,
          const std::function<grpc::Status(grpc::ClientContext*, const Request&, Reply*)>& call,
          const std::function<std::string(const Reply&)>& text) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(options_.timeout_seconds));
    Reply reply;
    const grpc::Status status = call(&context, request, &reply);
    if (!status.ok()) return Complain(status);
    std::cout << (options_.json ? ToJson(reply).dump(2) + "\n" : text(reply));
    return 0;
  }

  int Complain(const grpc::Status& status) const {
    std::cerr << "zeroshard: ";
    const bool connected = channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE && !connected) {
      std::cerr << "no daemon answers at " << socket_
                << "; start zeroshardd, or name its socket with --socket or ZEROSHARD_SOCKET ("
                << status.error_message() << ")\n";
    } else {
      std::cerr << status.error_message() << "\n";
    }
    return kExitFailed;
  }

  const Options options_;
  std::string socket_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<Admin::Stub> admin_;
  std::unique_ptr<Trainer::Stub> trainer_;
};

int Command::Config() {
  admin::v1::ResolveConfigRequest request;
  const absl::StatusOr<std::string> text = ReadConfigFile(options_.file, kMaxConfigBytes);
  if (!text.ok()) {
    std::cerr << "zeroshard: " << text.status().message() << "\n";
    return kExitFailed;
  }
  request.set_ds_config(*text);
  request.set_world_size(options_.world_size);
  for (const std::string& set : options_.sets) {
    const size_t equals = set.find('=');
    if (equals == std::string::npos) {
      std::cerr << "zeroshard: --set " << set << ": expected key=JSON\n";
      return kExitUsage;
    }
    (*request.mutable_overrides())[set.substr(0, equals)] = set.substr(equals + 1);
  }
  return Run<admin::v1::ResolveConfigRequest, admin::v1::ResolveConfigReply>(
      request, [&](auto* c, auto& q, auto* r) { return admin_->ResolveConfig(c, q, r); },
      ConfigText);
}

int Command::Export() {
  trainer::v1::ExportRequest request;
  request.set_job(options_.job);
  request.set_name(options_.name.empty() ? options_.job : options_.name);
  request.set_overwrite(options_.overwrite);
  return Run<trainer::v1::ExportRequest, trainer::v1::ExportReply>(
      request, [&](auto* c, auto& q, auto* r) { return trainer_->Export(c, q, r); },
      [](const trainer::v1::ExportReply& reply) {
        return reply.path() + " (" + ReadableBytes(reply.bytes()) + ", step " +
               std::to_string(reply.step()) + ")\n";
      });
}

int Command::Remove() {
  admin::v1::RemoveJobRequest request;
  request.set_name(options_.job);
  request.set_force(options_.force);
  return Run<admin::v1::RemoveJobRequest, admin::v1::RemoveJobReply>(
      request, [&](auto* c, auto& q, auto* r) { return admin_->RemoveJob(c, q, r); },
      [this](const admin::v1::RemoveJobReply& reply) {
        return "removed " + options_.job + ", " + ReadableBytes(reply.bytes()) + " freed\n";
      });
}

int Command::Move() {
  admin::v1::MoveStatesRequest request;
  request.set_job(options_.job);
  request.set_state(options_.state);
  request.set_to(options_.to);
  for (const std::string& unit : options_.units) request.add_units(unit);
  if (!options_.rate.empty()) {
    const absl::StatusOr<uint64_t> rate = ParseByteSize(options_.rate);
    if (!rate.ok()) {
      std::cerr << "zeroshard: --rate: " << rate.status().message() << "\n";
      return kExitUsage;
    }
    request.set_bytes_per_second(*rate);
  }
  const int result = Run<admin::v1::MoveStatesRequest, admin::v1::MoveStatesReply>(
      request, [&](auto* c, auto& q, auto* r) { return admin_->MoveStates(c, q, r); },
      [this](const admin::v1::MoveStatesReply& reply) { return MoveText(reply); });
  return result != 0 || !options_.wait ? result : AwaitMove();
}

std::string Command::MoveText(const admin::v1::MoveStatesReply& reply) const {
  std::string text = ReadableBytes(reply.bytes()) + " of states move to " + options_.to;
  if (!reply.node().empty()) text += " on " + reply.node();
  if (!options_.wait) text += "; zeroshard job " + options_.job + " shows how far it is";
  text += "\n";
  for (const std::string& other : reply.other_nodes()) {
    text += "nothing moves on " + other + ": say the same to its daemon\n";
  }
  return text;
}

// For as long as states are on their way, however long that is.
int Command::AwaitMove() {
  admin::v1::GetJobRequest request;
  request.set_name(options_.job);
  while (true) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(options_.timeout_seconds));
    admin::v1::GetJobReply reply;
    const grpc::Status status = admin_->GetJob(&context, request, &reply);
    if (!status.ok()) return Complain(status);
    if (!reply.moving()) return 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

using Action = int (Command::*)();

// The subcommands; the one that is given ends up in `chosen`.
void AddCommands(CLI::App& app, Options& options, Action& chosen) {
  auto add = [&](const char* name, const char* help, Action action) {
    CLI::App* sub = app.add_subcommand(name, help);
    sub->add_flag("--json", options.json, "Print JSON");
    sub->callback([&chosen, action] { chosen = action; });
    sub->fallthrough();
    return sub;
  };
  add("status", "The daemon: version, devices, directories", &Command::Status);
  add("jobs", "One line for each job", &Command::Jobs);
  CLI::App* job =
      add("job", "One job: ranks, workers, memory by kind of state, counters", &Command::Job);
  job->add_option("name", options.job, "Name of the job")->required();
  add("tiers", "Capacity, use and free bytes of every tier", &Command::Tiers);
  CLI::App* nvme = add("nvme", "The files in the paths of the NVMe tier", &Command::Nvme);
  nvme->add_flag("--remove-stale", options.remove_stale, "Remove files of jobs that do not exist");
  CLI::App* config =
      add("config", "Resolves a ds_config.json: every value with its origin", &Command::Config);
  config->add_option("file", options.file, "The ds_config.json")->required();
  config->add_option("--world-size", options.world_size, "Ranks, to check the batch sizes against");
  config->add_option("--set", options.sets, "key=JSON, as the client would fill \"auto\"");
  CLI::App* write =
      add("export", "Writes a job's parameters as NAME.safetensors", &Command::Export);
  write->add_option("job", options.job, "Name of the job")->required();
  write->add_option("--name", options.name, "Name of the file (default: the job's)");
  write->add_flag("--overwrite", options.overwrite, "Replace an existing file");
  CLI::App* move =
      add("move", "Moves a job's optimizer states between host and NVMe while it trains",
          &Command::Move);
  move->add_option("job", options.job, "Name of the job")->required();
  move->add_option("--state", options.state, "optimizer: masters and optimizer states (default)");
  move->add_option("--to", options.to, "gpu, host or nvme")->required();
  move->add_option("--unit", options.units,
                   "Unit by index, or by the name of a parameter or module; may be repeated "
                   "(default: all)");
  move->add_option("--rate", options.rate,
                   "Bytes moved a second at most, as 200MiB; 0: no bound (default: 256MiB)");
  move->add_flag("--wait", options.wait, "Return when all has been moved");
  CLI::App* remove = add("remove", "Ends a job and frees its memory", &Command::Remove);
  remove->add_option("job", options.job, "Name of the job")->required();
  remove->add_flag("--force", options.force, "Also while ranks are attached");
}

int Main(int argc, char** argv) {
  CLI::App app("zeroshard: looks at and manages the jobs of a zeroshardd");
  Options options;
  Action action = nullptr;
  std::function<int()> local;  // a command that asks no daemon
  app.add_option("--socket", options.socket,
                 "The daemon's socket (default: ZEROSHARD_SOCKET, or the standard place)");
  app.add_option("--timeout", options.timeout_seconds, "Seconds to wait for an answer")
      ->check(CLI::Range(1, 86400));
  app.require_subcommand(1);
  AddCommands(app, options, action);
  AddBenchCommand(app, local);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (local) return local();
  Command command(options);
  return (command.*action)();
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
