// DaemonClient: the unary calls of the trainer API on the daemon's Unix socket.
//
// Each call opens a connection of its own: they are rare, and a daemon that was restarted in
// between is not noticed. Any thread.
#ifndef ZEROSHARD_CLIENT_DAEMON_CLIENT_H_
#define ZEROSHARD_CLIENT_DAEMON_CLIENT_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/trainer.pb.h"

namespace zeroshard {

class DaemonClient {
 public:
  // `socket` empty: DefaultSocketPath().
  explicit DaemonClient(std::string socket);

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

 private:
  std::string socket_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DAEMON_CLIENT_H_
