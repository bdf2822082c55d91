// WorkerProcess: one worker as the operating system sees it: a child with a pidfd and a link.
//
// The child gets the link as descriptor kWorkerLinkFd and nothing else beyond stdin, stdout and
// stderr, and is killed by the kernel when the thread that spawned it ends (PR_SET_PDEATHSIG).
// Decision thread.

#ifndef ZEROSHARD_SERVER_WORKER_PROCESS_H_
#define ZEROSHARD_SERVER_WORKER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "server/node_cores.h"

namespace zeroshard {

struct WorkerProcess {
  pid_t pid = 0;
  UniqueFd pidfd;  // readable once the child has ended
  UniqueFd link;   // the server's end of the socketpair
  CoreHolder cores;
  std::shared_ptr<const void> room;  // of its files; let go when the process has been reaped
};

struct WorkerCommand {
  std::string binary;
  std::string job;
  uint32_t worker = 0;
  // From 1. ZEROSHARD_FAULTS reaches the first incarnation only, so that a fault does not hit again
  // whoever recovers from it.
  uint32_t incarnation = 1;
};

// Starts `binary --job=NAME --worker=W --incarnation=I`.
absl::StatusOr<WorkerProcess> SpawnWorker(const WorkerCommand& command);

// How the child ended ("killed by signal 9 (Killed)"), and reaps it; nothing while it runs.
std::optional<std::string> ReapWorker(const WorkerProcess& process);

void KillWorker(const WorkerProcess& process, int signal);

// What the kernel says of a child that was not reaped.
struct ProcessState {
  bool stopped = false;  // by a signal
  bool traced = false;   // by a debugger
};
ProcessState GetProcessState(const WorkerProcess& process);

// A pidfd of any process, for noticing its death. NotFound when it is gone already.
absl::StatusOr<UniqueFd> OpenPidfd(pid_t pid);

// `configured`, or zeroshard-worker beside the running program. NotFound or PermissionDenied when
// it cannot be executed.
absl::StatusOr<std::string> FindWorkerBinary(const std::string& configured);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_WORKER_PROCESS_H_
