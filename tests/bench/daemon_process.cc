#include "tests/bench/daemon_process.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/fd_passing.h"
#include "base/status.h"

namespace zeroshard::bench {
namespace {

constexpr int kStartTries = 200;
constexpr absl::Duration kStartInterval = absl::Milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(
    const std::string& program, const std::vector<std::string>& devices,
    const std::string& metrics_address) {
  char folder[] = "/tmp/zs-bench-XXXXXX";
  if (mkdtemp(folder) == nullptr) return ErrnoError(errno, "mkdtemp", folder);
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess(folder));
  std::error_code failed;
  const auto self = std::filesystem::canonical(program, failed);
  if (failed) return absl::NotFoundError(absl::StrCat(program, ": ", failed.message()));
  // <tree>/tests/bench/NAME
  const std::string tree = self.parent_path().parent_path().parent_path().string();
  ZS_RETURN_IF_ERROR(daemon->Spawn(tree, devices, metrics_address));
  ZS_RETURN_IF_ERROR(daemon->AwaitSocket());
  return daemon;
}

absl::Status DaemonProcess::Spawn(const std::string& tree, const std::vector<std::string>& devices,
                                  const std::string& metrics_address) {
  std::vector<std::string> arguments = {tree + "/server/zeroshardd",
                                        "--worker-binary=" + tree + "/worker/zeroshard-worker",
                                        "--metrics-address=" + metrics_address, "--log-level=warn"};
  for (const char* directory : {"run", "state", "checkpoint", "export"}) {
    const std::string path = absl::StrCat(folder_, "/", directory);
    std::error_code failed;
    std::filesystem::create_directory(path, failed);
    if (failed) return absl::UnavailableError(absl::StrCat(path, ": ", failed.message()));
    arguments.push_back(absl::StrCat("--", directory, "-dir=", path));
  }
  for (const std::string& device : devices) arguments.push_back("--device=" + device);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ < 0) return ErrnoError(errno, "fork", "zeroshardd");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    execv(argv[0], argv.data());
    _exit(127);
  }
  return absl::OkStatus();
}

absl::Status DaemonProcess::AwaitSocket() {
  for (int i = 0; i < kStartTries; ++i) {
    if (ConnectUnix(socket(), absl::Seconds(1), UnixSocketType::kStream).ok()) {
      return absl::OkStatus();
    }
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      return absl::UnavailableError("zeroshardd ended at once; its message is above");
    }
    absl::SleepFor(kStartInterval);
  }
  return absl::DeadlineExceededError("zeroshardd does not listen");
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace zeroshard::bench
