// Server: the daemon, whole. Built by hand from its parts; start and stop read top to bottom in
// server.cc.
//
// Threads: gRPC's own (handlers), one decision thread (the one that calls Run), one journal writer,
// and the metrics endpoint's.

#ifndef ZEROSHARD_SERVER_SERVER_H_
#define ZEROSHARD_SERVER_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/daemon_config.h"
#include "server/node_gpus.h"

namespace zeroshard {

// The GPUs that `config` names, probed by the worker program; null where its devices are the
// host's. Errors as NodeGpus::Create; those and what FindWorkerBinary says.
absl::StatusOr<std::unique_ptr<NodeGpus>> FindGpus(const DaemonConfig& config);

class Server {
 public:
  // Makes directories, sockets, the metrics endpoint and the journal; on an error nothing of it is
  // left. `gpus`: from FindGpus.
  static absl::StatusOr<std::unique_ptr<Server>> Create(const DaemonConfig& config,
                                                        std::unique_ptr<NodeGpus> gpus);

  // Serves until Stop, or SIGTERM or SIGINT when `shutdown_fd` (a signalfd, or any descriptor that
  // becomes readable) says so. Jobs are ended, workers stopped, sockets removed.
  void Run(int shutdown_fd);

  // From any thread.
  void Stop();

  const std::string& socket_path() const;
  // "127.0.0.1:9464" as bound; "" when metrics are off.
  const std::string& metrics_address() const;

  ~Server();

 private:
  struct Parts;
  explicit Server(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_SERVER_H_
