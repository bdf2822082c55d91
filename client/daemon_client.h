// DaemonClient: the unary calls of the trainer API on the daemon's Unix socket.
//
// Each call opens a connection of its own: they are rare, and a daemon that was restarted in
// between is not noticed. Any thread.
#ifndef ZEROSHARD_CLIENT_DAEMON_CLIENT_H_
#define ZEROSHARD_CLIENT_DAEMON_CLIENT_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/trainer.pb.h"

namespace zeroshard {

class DaemonClient {
 public:
  // `socket` empty: DefaultSocketPath(). `interrupted`, when set, is asked during calls; true
  // cancels.
  explicit DaemonClient(std::string socket, std::function<bool()> interrupted = {});

  const std::string& socket() const { return socket_; }

  // Unavailable or NotFound, with the socket's path and what to do, when no daemon answers; else
  // the daemon's own answer. DeadlineExceeded after `timeout`.
  absl::StatusOr<trainer::v1::AttachReply> Attach(const trainer::v1::AttachRequest& request,
                                                  absl::Duration timeout) const;
  absl::StatusOr<trainer::v1::DetachReply> Detach(const trainer::v1::DetachRequest& request,
                                                  absl::Duration timeout) const;
  absl::StatusOr<trainer::v1::SaveReply> Save(const trainer::v1::SaveRequest& request,
                                              absl::Duration timeout) const;
  absl::StatusOr<trainer::v1::RestoreReply> Restore(const trainer::v1::RestoreRequest& request,
                                                    absl::Duration timeout) const;
  absl::StatusOr<trainer::v1::ExportReply> Export(const trainer::v1::ExportRequest& request,
                                                  absl::Duration timeout) const;
  absl::StatusOr<trainer::v1::RendezvousReply> Rendezvous(
      const trainer::v1::RendezvousRequest& request, absl::Duration timeout) const;

 private:
  // One call: `start(stub, context, request, reply, callback)` begins it.
  template <typename Reply, typename Request, typename Start>
  absl::StatusOr<Reply> Call(Start start, const Request& request, absl::Duration timeout) const;

  std::string socket_;
  std::function<bool()> interrupted_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DAEMON_CLIENT_H_
