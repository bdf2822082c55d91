// ControlLink: the worker's end of the socketpair that links it to the server.
//
// The server starts a worker with the socket as descriptor kWorkerLinkFd and sends ToWorker.start
// first. Owned by the worker's main object. Receive and Send may run on two different threads; each
// of them on one thread at a time (Send locks). A link that failed once stays failed: the worker
// ends, because its server is gone or will replace it.

#ifndef ZEROSHARD_WORKER_CONTROL_LINK_H_
#define ZEROSHARD_WORKER_CONTROL_LINK_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "proto/internal.pb.h"

namespace zeroshard {

class ControlLink {
 public:
  // Takes over the socket.
  explicit ControlLink(UniqueFd socket) : socket_(std::move(socket)) {}

  struct Start {
    internal::v1::WorkerStart start;
    // The descriptors of start.regions(), in their order.
    std::vector<UniqueFd> regions;
  };
  // The first message. DataLoss when it is not a Start, or its descriptors do not match its
  // regions.
  absl::StatusOr<Start> ReceiveStart(absl::Duration timeout);

  struct Command {
    internal::v1::ToWorker message;
    std::vector<UniqueFd> fds;
  };
  // The next message. Unavailable when the server is gone, DeadlineExceeded when none came in time.
  absl::StatusOr<Command> Receive(absl::Duration timeout);

  // `fds` go with it; they stay the caller's.
  absl::Status Send(const internal::v1::FromWorker& message, const std::vector<int>& fds = {});

  // To poll for readability beside other descriptors.
  int fd() const { return socket_.get(); }

 private:
  const UniqueFd socket_;
  absl::Mutex send_mu_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_CONTROL_LINK_H_
