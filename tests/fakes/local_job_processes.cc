// A LocalJob whose workers run in a process that may be killed.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/fault_point.h"
#include "base/fd_passing.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;

void Must(const absl::Status& status) { ZS_CHECK(status.ok(), std::string(status.message())); }

}  // namespace

bool LocalJob::RunInChild(const std::string& faults, absl::Duration delay) {
  for (uint32_t w = 0; w < options_.workers; ++w) StopWorker(w);  // threads do not come along
  const pid_t child = fork();
  if (child == 0) {
    ResetFaultPoints();
    Must(ArmFaultPoints(faults));
    for (uint32_t w = 0; w < options_.workers; ++w) RestartWorker(w);
    for (uint32_t rank = 0; rank < ranks(); ++rank) Reconnect(rank);
    Run();
    RunMoves();
    _exit(0);
  }
  if (delay != absl::InfiniteDuration()) {
    absl::SleepFor(delay);
    kill(child, SIGKILL);
  }
  int status = 0;
  ZS_CHECK(waitpid(child, &status, 0) == child, "wait");
  ZS_CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, "the child failed");
  for (uint32_t w = 0; w < options_.workers; ++w) RestartWorker(w);
  for (uint32_t rank = 0; rank < ranks(); ++rank) Reconnect(rank);
  return WIFSIGNALED(status);
}

void LocalJob::StartProcess(bool recover) {
  for (uint32_t w = 0; w < options_.workers; ++w) Must(StartWorker(w, recover));
  const uint64_t dead = next_generation();
  for (uint32_t w = 0; w < options_.workers && recover; ++w) engine(w).OnDropAttempt(dead);
  for (uint32_t rank = 0; rank < ranks(); ++rank) Hello(rank, false);
}

// A byte with the descriptors for each worker.
void LocalJob::SendMade(int socket) {
  for (const std::vector<DeviceShard::Made>& made : made_) {
    std::vector<int> fds;
    std::string kinds;
    for (const DeviceShard::Made& region : made) {
      fds.push_back(region.fd.get());
      absl::StrAppend(&kinds, static_cast<int>(region.kind), " ", region.bytes, " ");
    }
    Must(SendMessage(socket, kinds.empty() ? "-" : kinds, fds, absl::Seconds(10)));
  }
}

void LocalJob::ReceiveMade(int socket) {
  for (std::vector<DeviceShard::Made>& made : made_) {
    absl::StatusOr<Message> message = ReceiveMessage(socket, absl::Seconds(60));
    if (!message.ok()) return;  // it died before
    std::istringstream words(message->bytes);
    for (UniqueFd& fd : message->fds) {
      int kind = 0;
      uint64_t bytes = 0;
      words >> kind >> bytes;
      made.push_back({static_cast<WorkerRegion::Kind>(kind), bytes, std::move(fd)});
    }
  }
  was_started_ = true;
}

bool LocalJob::RunProcess(const std::string& faults, const std::function<void()>& work) {
  int sockets[2];
  ZS_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0, "socketpair");
  UniqueFd ours(sockets[0]);
  UniqueFd theirs(sockets[1]);
  generation_ += 1000;  // of the child's
  const pid_t child = fork();
  if (child == 0) {
    ours.reset();
    ResetFaultPoints();
    Must(ArmFaultPoints(faults));
    StartProcess(was_started_);
    if (!was_started_) SendMade(theirs.get());
    Run();
    work();
    _exit(0);
  }
  theirs.reset();
  if (!was_started_) ReceiveMade(ours.get());
  int status = 0;
  ZS_CHECK(waitpid(child, &status, 0) == child, "wait");
  ZS_CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, "the child failed");
  ZS_CHECK(!WIFSIGNALED(status) || WTERMSIG(status) == SIGKILL, "the child crashed");
  return WIFSIGNALED(status);
}

}  // namespace zeroshard
