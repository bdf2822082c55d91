// SessionServer: the worker's front door, service Session of proto/trainer.proto.
//
// Accepts connections on the listener that the server owns (so connections wait, not fail, while a
// worker is replaced), checks the peer's user, and runs one stream for each rank. A stream whose
// Hello carries the rank's token replaces an older stream of that rank. Requests go to the event
// queue in order; replies may be sent from any thread and are dropped when the rank has no stream.
// No gRPC in this header.
#ifndef ZEROSHARD_WORKER_SESSION_SERVER_H_
#define ZEROSHARD_WORKER_SESSION_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "proto/trainer.pb.h"
#include "worker/event_queue.h"

namespace zeroshard {

// Who may open a rank's stream.
struct RankCredentials {
  uint64_t generation = 0;
  std::string token;
  uint32_t uid = 0;
};

class SessionServer {
 public:
  static absl::StatusOr<std::unique_ptr<SessionServer>> Start(UniqueFd listener, uint32_t ranks,
                                                              EventQueue& events);
  ~SessionServer();
  SessionServer(const SessionServer&) = delete;
  SessionServer& operator=(const SessionServer&) = delete;

  // From now on only these credentials open the rank's stream; an open one is ended.
  void SetCredentials(uint32_t rank, RankCredentials credentials);
  void EndStream(uint32_t rank);
  void Send(uint32_t rank, trainer::v1::SessionReply reply);

 private:
  class Impl;
  explicit SessionServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_SESSION_SERVER_H_
