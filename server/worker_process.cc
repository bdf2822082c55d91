#include "server/worker_process.h"

#include <linux/close_range.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fd_passing.h"
#include "base/status.h"
#include "proto/worker_link.h"

extern char** environ;

namespace zeroshard {
namespace {

constexpr char kFaultVariable[] = "ZEROSHARD_FAULTS=";

// Exit code of a child that could not become the worker.
constexpr int kExecFailed = 127;

// Between fork and exec: async-signal-safe calls only.
[[noreturn]] void BecomeWorker(int link, const char* binary, char* const* argv, char* const* env,
                               pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExecFailed);
  setpgid(0, 0);  // a terminal's Ctrl-C is for the server, which tells its workers to stop
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (link == kWorkerLinkFd) {
    // Already in place, but still close-on-exec.
    const int copy = dup(link);
    if (copy < 0 || dup2(copy, kWorkerLinkFd) < 0) _exit(kExecFailed);
  } else if (dup2(link, kWorkerLinkFd) < 0) {
    _exit(kExecFailed);
  }
  syscall(SYS_close_range, kWorkerLinkFd + 1, ~0U, 0);
  execve(binary, argv, env);
  _exit(kExecFailed);
}

}  // namespace

absl::StatusOr<UniqueFd> OpenPidfd(pid_t pid) {
  UniqueFd fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!fd.valid()) {
    if (errno == ESRCH) return absl::NotFoundError(absl::StrCat("process ", pid, " has ended"));
    return ErrnoError(errno, "pidfd_open", absl::StrCat("process ", pid));
  }
  return fd;
}

absl::StatusOr<WorkerProcess> SpawnWorker(const WorkerCommand& command) {
  ZS_ASSIGN_OR_RETURN(auto sockets, UnixSocketPair());
  std::vector<std::string> arguments = {command.binary, absl::StrCat("--job=", command.job),
                                        absl::StrCat("--worker=", command.worker),
                                        absl::StrCat("--incarnation=", command.incarnation)};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::vector<char*> env;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const bool fault = std::strncmp(*variable, kFaultVariable, sizeof(kFaultVariable) - 1) == 0;
    if (!fault || command.incarnation == 1) env.push_back(*variable);
  }
  env.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return ErrnoError(errno, "fork", command.binary);
  if (pid == 0) {
    BecomeWorker(sockets.second.get(), command.binary.c_str(), argv.data(), env.data(), parent);
  }
  WorkerProcess process;
  process.pid = pid;
  process.link = std::move(sockets.first);
  ZS_ASSIGN_OR_RETURN(process.pidfd, OpenPidfd(pid));  // not reaped yet: cannot be gone
  return process;
}

std::optional<std::string> ReapWorker(const WorkerProcess& process) {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(process.pid), &info, WEXITED | WNOHANG) != 0) {
    return absl::StrCat("ended unnoticed (", std::strerror(errno), ")");
  }
  if (info.si_pid == 0) return std::nullopt;
  if (info.si_code == CLD_EXITED) {
    return absl::StrCat("exited with code ", info.si_status,
                        info.si_status == kExecFailed ? " (could not be executed)" : "");
  }
  return absl::StrCat("killed by signal ", info.si_status, " (", strsignal(info.si_status), ")");
}

void KillWorker(const WorkerProcess& process, int signal) {
  if (process.pidfd.valid()) {
    syscall(SYS_pidfd_send_signal, process.pidfd.get(), signal, nullptr, 0);
  }
}

ProcessState GetProcessState(const WorkerProcess& process) {
  ProcessState state;
  std::ifstream file(absl::StrCat("/proc/", process.pid, "/status"));
  for (std::string key, value; file >> key >> value;) {
    if (key == "State:") state.stopped = value == "T" || value == "t";
    if (key == "TracerPid:") state.traced = value != "0";
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return state;
}

absl::StatusOr<std::string> FindWorkerBinary(const std::string& configured) {
  std::string path = configured;
  if (path.empty()) {
    char self[4096];
    const ssize_t bytes = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (bytes < 0) return ErrnoError(errno, "readlink", "/proc/self/exe");
    path.assign(self, static_cast<size_t>(bytes));
    path = absl::StrCat(path.substr(0, path.rfind('/')), "/zeroshard-worker");
    // In a build tree the programs lie in the folders of their packages.
    const std::string built =
        absl::StrCat(path.substr(0, path.rfind('/')), "/../worker/zeroshard-worker");
    if (access(path.c_str(), X_OK) != 0 && access(built.c_str(), X_OK) == 0) path = built;
  }
  if (access(path.c_str(), X_OK) != 0) {
    return Annotate(ErrnoError(errno, "access", path),
                    "the worker program cannot be executed (key worker_binary)");
  }
  return path;
}

}  // namespace zeroshard
