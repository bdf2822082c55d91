#include "base/metrics_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <exception>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "prometheus/collectable.h"
#include "prometheus/exposer.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace zeroshard {
namespace {

prometheus::MetricType TypeOf(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return prometheus::MetricType::Counter;
    case MetricType::kGauge:
      return prometheus::MetricType::Gauge;
    case MetricType::kHistogram:
      return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

prometheus::ClientMetric::Histogram ToPrometheus(const Histogram& histogram) {
  prometheus::ClientMetric::Histogram result;
  const std::vector<uint64_t> counts = histogram.counts();
  uint64_t cumulative = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    cumulative += counts[i];
    prometheus::ClientMetric::Bucket bucket;
    bucket.cumulative_count = cumulative;
    bucket.upper_bound = i < histogram.bounds().size() ? histogram.bounds()[i]
                                                       : std::numeric_limits<double>::infinity();
    result.bucket.push_back(bucket);
  }
  result.sample_count = cumulative;
  result.sample_sum = histogram.sum();
  return result;
}

prometheus::ClientMetric ToPrometheus(const MetricSeries& series) {
  prometheus::ClientMetric metric;
  for (const auto& [name, value] : series.labels) metric.label.push_back({name, value});
  if (series.counter) metric.counter.value = series.counter->value();
  if (series.gauge) metric.gauge.value = series.gauge->value();
  if (series.histogram) metric.histogram = ToPrometheus(*series.histogram);
  return metric;
}

std::vector<prometheus::MetricFamily> ToPrometheus(const MetricsTable& table) {
  std::vector<prometheus::MetricFamily> result;
  for (const MetricFamily& family : table.Families()) {
    prometheus::MetricFamily exported;
    exported.name = family.name;
    exported.help = family.help;
    exported.type = TypeOf(family.type);
    for (const MetricSeries& series : family.series) {
      exported.metric.push_back(ToPrometheus(series));
    }
    result.push_back(std::move(exported));
  }
  return result;
}

class TableCollector final : public prometheus::Collectable {
 public:
  explicit TableCollector(std::shared_ptr<const MetricsTable> table) : table_(std::move(table)) {}
  std::vector<prometheus::MetricFamily> Collect() const override { return ToPrometheus(*table_); }

 private:
  const std::shared_ptr<const MetricsTable> table_;
};

struct Endpoint {
  in_addr host = {};
  uint16_t port = 0;
};

absl::StatusOr<Endpoint> ParseEndpoint(const MetricsServer::Options& options) {
  const std::string& text = options.address;
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  Endpoint endpoint;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port) ||
      port > 65535 || ::inet_pton(AF_INET, text.substr(0, colon).c_str(), &endpoint.host) != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metrics address \"", text, "\": expected a numeric address and a port (127.0.0.1:9464)"));
  }
  const bool loopback = (ntohl(endpoint.host.s_addr) >> 24) == 127;
  if (!loopback && !options.allow_remote) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics address \"", text,
                     "\" is not on the loopback interface: metrics are not authenticated, so "
                     "another address must be allowed explicitly"));
  }
  endpoint.port = static_cast<uint16_t>(port);
  return endpoint;
}

// The HTTP server reports a used port without a reason, so the port is tried here first.
absl::Status ProbePort(const Endpoint& endpoint, const std::string& address) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoError(errno, "open", "a TCP socket");
  const int reuse = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  sockaddr_in target = {};
  target.sin_family = AF_INET;
  target.sin_addr = endpoint.host;
  target.sin_port = htons(endpoint.port);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&target), sizeof(target)) != 0) {
    return ErrnoError(errno, "listen for metrics on", address);
  }
  return absl::OkStatus();
}

}  // namespace

std::string MetricsText(const MetricsTable& table) {
  return prometheus::TextSerializer().Serialize(ToPrometheus(table));
}

struct MetricsServer::Impl {
  std::shared_ptr<TableCollector> collector;  // the exposer holds it weakly
  std::unique_ptr<prometheus::Exposer> exposer;
  int port = 0;
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    std::shared_ptr<const MetricsTable> table, const Options& options) {
  ZS_ASSIGN_OR_RETURN(const Endpoint endpoint, ParseEndpoint(options));
  ZS_RETURN_IF_ERROR(ProbePort(endpoint, options.address));
  auto impl = std::make_unique<Impl>();
  impl->collector = std::make_shared<TableCollector>(std::move(table));
  try {
    impl->exposer = std::make_unique<prometheus::Exposer>(options.address, 1);
    impl->exposer->RegisterCollectable(impl->collector);
    impl->port = impl->exposer->GetListeningPorts().at(0);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", options.address, ": ", error.what()));
  }
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

int MetricsServer::port() const { return impl_->port; }

}  // namespace zeroshard
