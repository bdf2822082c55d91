// Exports a MetricsTable to Prometheus, over HTTP at /metrics, or as text for tests and tools.

#ifndef ZEROSHARD_BASE_METRICS_SERVER_H_
#define ZEROSHARD_BASE_METRICS_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/metrics.h"

namespace zeroshard {

// The table in Prometheus' text format 0.0.4.
std::string MetricsText(const MetricsTable& table);

// Serves one table from its own threads until destroyed.
class MetricsServer {
 public:
  // Listens on `address` ("127.0.0.1:9464"; port 0 picks a free one). The address must be a
  // numeric one of the loopback interface unless `allow_remote`, else InvalidArgument; a used port
  // gives AlreadyExists, and nothing is left behind.
  struct Options {
    std::string address = "127.0.0.1:0";
    bool allow_remote = false;
  };
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      std::shared_ptr<const MetricsTable> table, const Options& options);

  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // The port that is really listened on.
  int port() const;

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_METRICS_SERVER_H_
