// ClusterConfig: the daemons that may run one job together, as each of them is told.
//
// Static today: every daemon gets the same list of addresses and its own place in it. A job uses
// the first of them, as many as its ranks need (server/placement.h). Pure.

#ifndef ZEROSHARD_SERVER_CLUSTER_CONFIG_H_
#define ZEROSHARD_SERVER_CLUSTER_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/config.h"

namespace zeroshard {

struct ClusterConfig {
  uint32_t node = 0;                   // this daemon's place in `addresses`
  std::vector<std::string> addresses;  // "10.0.0.1:7401", "[fd00::1]:7401"; by node; empty: alone
  bool allow_insecure = false;         // addresses that are not loopback; there is no TLS

  bool alone() const { return addresses.empty(); }
  // "node 1 (127.0.0.1:7402)".
  std::string NodeName(uint32_t node) const;
};

// The number of an address without its port, "10.0.0.1"; InvalidArgument when it is not numeric.
absl::StatusOr<std::string> HostOf(const std::string& address);

// Whether nobody outside this host reaches the address.
bool IsLoopback(const std::string& host);

// The mapping `cluster` of the daemon's configuration, checked: InvalidArgument for an own place
// outside the list, an address that is not numeric, or named twice, or not loopback unless
// `allow_insecure` is true.
absl::StatusOr<ClusterConfig> ReadCluster(const YamlNode& yaml);

// As a line of YAML.
std::string ClusterText(const ClusterConfig& cluster);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_CLUSTER_CONFIG_H_
