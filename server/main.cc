// zeroshardd: the shard server of one node.
#include <sys/resource.h>
#include <sys/signalfd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <iostream>
#include <string>

#include "base/config.h"
#include "base/log.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "base/version.h"
#include "server/daemon_config.h"
#include "server/server.h"
#include "server/worker_process.h"

namespace zeroshard {
namespace {

constexpr int kExitBadConfig = 2;
constexpr int kExitFailed = 1;
constexpr int kExitNoDevice = 3;  // a GPU that the configuration names cannot be used

int Complain(const absl::Status& status, int code) {
  std::cerr << "zeroshardd: " << status.message() << "\n";
  return code;
}

// SIGTERM and SIGINT as a descriptor; before any thread is made, so that all of them inherit the
// mask.
absl::StatusOr<UniqueFd> SignalDescriptor() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  if (sigprocmask(SIG_BLOCK, &signals, nullptr) != 0) {
    return ErrnoError(errno, "sigprocmask", "SIGTERM");
  }
  UniqueFd fd(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd.valid()) return ErrnoError(errno, "signalfd", "SIGTERM");
  return fd;
}

// A job holds a descriptor for each region, worker and rank: as many as the system lets this user
// have.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    LogWarn("the limit of open files could not be raised");
  }
}

void AddFlags(CLI::App& app, DaemonFlags& flags, bool& check) {
  app.add_option("--config", flags.config_file, "YAML file; see docs/operations.md");
  app.add_flag("--check-config", check, "Check the configuration, print it, and exit");
  app.add_option("--run-dir", flags.run_dir, "Directory of the sockets");
  app.add_option("--state-dir", flags.state_dir, "Directory of the journal");
  app.add_option("--checkpoint-dir", flags.checkpoint_dir, "Directory of checkpoints");
  app.add_option("--export-dir", flags.export_dir, "Directory of exported models");
  app.add_option("--worker-binary", flags.worker_binary,
                 "The zeroshard-worker program (default: beside this one)");
  app.add_option("--device", flags.devices,
                 "Device of workers, as cpu:0 or cuda:0; may be repeated; cuda:all");
  app.add_option("--metrics-address", flags.metrics_address, "Address of /metrics, or off");
  app.add_option("--host-memory-limit", flags.host_memory_limit,
                 "Bytes that all jobs together may use, as 64GiB");
  app.add_option("--gpu-memory-limit", flags.gpu_memory_limit,
                 "Bytes of each GPU that all jobs together may use, as 60GiB");
  app.add_option("--nvme-path", flags.nvme_paths,
                 "Directory of the NVMe tier, as PATH or PATH=WEIGHT; may be repeated");
  app.add_option("--log-level", flags.log_level, "debug, info, warn, error or off");
  app.set_version_flag("--version", kVersion);
}

int Main(int argc, char** argv) {
  SetLogProcess("zeroshardd");
  CLI::App app("zeroshardd: holds the model states of training jobs");
  DaemonFlags flags;
  bool check = false;
  AddFlags(app, flags, check);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitBadConfig;
  }
  const absl::StatusOr<DaemonConfig> config = LoadDaemonConfig(flags);
  if (!config.ok()) return Complain(config.status(), kExitBadConfig);
  if (check) {
    std::cout << DaemonConfigText(*config);
    return 0;
  }
  SetLogLevel(config->log_level);
  if (absl::Status armed = ArmFaultPointsFromEnv(); !armed.ok()) {
    return Complain(armed, kExitBadConfig);
  }
  RaiseDescriptorLimit();
  absl::StatusOr<UniqueFd> signals = SignalDescriptor();
  if (!signals.ok()) return Complain(signals.status(), kExitFailed);
  absl::StatusOr<std::unique_ptr<NodeGpus>> gpus = FindGpus(*config);
  if (!gpus.ok()) return Complain(gpus.status(), kExitNoDevice);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(*config, *std::move(gpus));
  if (!server.ok()) return Complain(server.status(), kExitFailed);
  (*server)->Run(signals->get());
  return 0;
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
