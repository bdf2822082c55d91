#include "tests/device/cuda/owner_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fd_passing.h"
#include "base/status.h"
#include "base/strings.h"

extern char** environ;

namespace zeroshard {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// The environment with `variables` in place of those of the same names.
std::vector<char*> EnvironmentWith(const std::vector<std::string>& variables) {
  const auto replaced = [&variables](std::string_view variable) {
    const std::string_view name = variable.substr(0, variable.find('=') + 1);
    for (const std::string& other : variables) {
      if (std::string_view(other).substr(0, name.size()) == name) return true;
    }
    return false;
  };
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!replaced(*variable)) environment.push_back(*variable);
  }
  for (const std::string& variable : variables) {
    environment.push_back(const_cast<char*>(variable.c_str()));
  }
  environment.push_back(nullptr);
  return environment;
}

}  // namespace

absl::StatusOr<OwnerProcess> OwnerProcess::Start(const std::string& program, uint64_t bytes,
                                                 uint8_t value,
                                                 const std::vector<std::string>& variables) {
  OwnerProcess owner;
  ZS_ASSIGN_OR_RETURN(auto sockets, UnixSocketPair());
  owner.socket_ = std::move(sockets.first);
  if (fcntl(sockets.second.get(), F_SETFD, 0) != 0) return ErrnoError(errno, "fcntl", "a socket");
  const std::string fd = absl::StrCat(sockets.second.get());
  const std::string size = absl::StrCat(bytes);
  const std::string fill = absl::StrCat(value);
  const char* arguments[] = {program.c_str(), fd.c_str(), size.c_str(), fill.c_str(), nullptr};
  const int error = posix_spawn(&owner.pid_, program.c_str(), nullptr, nullptr,
                                const_cast<char**>(arguments), EnvironmentWith(variables).data());
  if (error != 0) return ErrnoError(error, "posix_spawn", program);
  sockets.second.reset();
  ZS_ASSIGN_OR_RETURN(Message message, ReceiveMessage(owner.socket_.get(), kPatience));
  if (message.bytes != "ready" || message.fds.size() != 1) {
    return absl::UnavailableError(absl::StrCat(program, ": ", message.bytes));
  }
  owner.memory_ = std::move(message.fds[0]);
  return owner;
}

OwnerProcess::OwnerProcess(OwnerProcess&& other) noexcept
    : socket_(std::move(other.socket_)),
      memory_(std::move(other.memory_)),
      pid_(std::exchange(other.pid_, 0)) {}

OwnerProcess::~OwnerProcess() { Kill().IgnoreError(); }

absl::Status OwnerProcess::Ask(const std::string& request) {
  ZS_RETURN_IF_ERROR(SendMessage(socket_.get(), request, {}, kPatience));
  ZS_ASSIGN_OR_RETURN(const Message answer, ReceiveMessage(socket_.get(), kPatience));
  if (answer.bytes == "done") return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the owner of the memory: ", answer.bytes));
}

absl::Status OwnerProcess::FillAgain() { return Ask("fill"); }

absl::Status OwnerProcess::KeepBusy() { return Ask("busy"); }

absl::Status OwnerProcess::Kill() {
  if (pid_ <= 0) return absl::OkStatus();
  const pid_t pid = std::exchange(pid_, 0);
  kill(pid, SIGKILL);
  int status = 0;
  if (waitpid(pid, &status, 0) != pid) return ErrnoError(errno, "waitpid", "the memory's owner");
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the memory's owner ended by itself, status ", status));
}

}  // namespace zeroshard
