#include "server/cluster_config.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr int64_t kMaxNodes = 1024;

bool IsNumeric(int family, const std::string& host) {
  in6_addr ignored;  // as long as the longest
  return inet_pton(family, host.c_str(), &ignored) == 1;
}

}  // namespace

std::string ClusterConfig::NodeName(uint32_t n) const {
  if (n >= addresses.size()) return absl::StrCat("node ", n);
  return absl::StrCat("node ", n, " (", addresses[n], ")");
}

absl::StatusOr<std::string> HostOf(const std::string& address) {
  const auto wrong = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a numeric address with a port, as \"10.0.0.1:7401\" or "
                     "\"[fd00::1]:7401\", found \"",
                     address, "\""));
  };
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port) ||
      port == 0 || port > 65535) {
    return wrong();
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    return IsNumeric(AF_INET6, host) ? absl::StatusOr<std::string>(host) : wrong();
  }
  return IsNumeric(AF_INET, host) ? absl::StatusOr<std::string>(host) : wrong();
}

bool IsLoopback(const std::string& host) { return host == "::1" || host.rfind("127.", 0) == 0; }

absl::StatusOr<ClusterConfig> ReadCluster(const YamlNode& yaml) {
  ClusterConfig cluster;
  ZS_ASSIGN_OR_RETURN(const int64_t node, yaml.Int("node", 0, {0, kMaxNodes - 1}));
  cluster.node = static_cast<uint32_t>(node);
  ZS_ASSIGN_OR_RETURN(cluster.addresses, yaml.Strings("addresses"));
  ZS_ASSIGN_OR_RETURN(cluster.allow_insecure, yaml.Bool("allow_insecure", false));
  const size_t nodes = cluster.addresses.size();
  if (nodes < 2 || nodes > kMaxNodes) {
    return yaml.Error("addresses", absl::StrCat("expected 2 to ", kMaxNodes,
                                                " addresses, one for each daemon, found ", nodes));
  }
  if (cluster.node >= nodes) {
    return yaml.Error("node", absl::StrCat("expected this daemon's place in addresses, 0 to ",
                                           nodes - 1, ", found ", node));
  }
  std::set<std::string> seen;
  for (const std::string& address : cluster.addresses) {
    const absl::StatusOr<std::string> host = HostOf(address);
    if (!host.ok()) return yaml.Error("addresses", std::string(host.status().message()));
    if (!seen.insert(address).second) {
      return yaml.Error("addresses", absl::StrCat("\"", address, "\" is named twice"));
    }
    if (!IsLoopback(*host) && !cluster.allow_insecure) {
      return yaml.Error(
          "addresses",
          absl::StrCat("\"", address, "\" is not loopback, and daemons talk without encryption or ",
                       "authentication; on a network that nobody else reaches set ",
                       "allow_insecure: true"));
    }
  }
  return cluster;
}

std::string ClusterText(const ClusterConfig& cluster) {
  if (cluster.alone()) return "";
  return absl::StrCat("cluster: {node: ", cluster.node, ", addresses: [\"",
                      absl::StrJoin(cluster.addresses, "\", \""),
                      "\"], allow_insecure: ", cluster.allow_insecure ? "true" : "false", "}\n");
}

}  // namespace zeroshard
