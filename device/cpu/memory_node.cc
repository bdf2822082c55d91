#include "device/cpu/memory_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr int kMaxNodes = 1024;  // of Linux
constexpr int kBits = 8 * sizeof(unsigned long);

}  // namespace

absl::StatusOr<int> NodeOfCpu(int cpu) {
  // A processor's directory has a link to its node.
  const std::string directory = absl::StrCat("/sys/devices/system/cpu/cpu", cpu, "/node");
  for (int node = 0; node < kMaxNodes; ++node) {
    if (::access(absl::StrCat(directory, node).c_str(), F_OK) == 0) return node;
  }
  return absl::NotFoundError(absl::StrCat("the NUMA node of processor ", cpu, " is not known"));
}

absl::Status PlaceOnNode(std::span<std::byte> memory, int node) {
  const std::string name = absl::StrCat("memory of NUMA node ", node);
  if (node < 0 || node >= kMaxNodes) return absl::InvalidArgumentError(absl::StrCat("no ", name));
  std::array<unsigned long, kMaxNodes / kBits> nodes = {};
  nodes[node / kBits] = 1UL << node % kBits;
  // The kernel takes one bit less than it is told.
  if (::syscall(SYS_mbind, memory.data(), memory.size(), MPOL_PREFERRED, nodes.data(),
                kMaxNodes + 1, MPOL_MF_MOVE) == 0) {
    return absl::OkStatus();
  }
  if (errno == ENOSYS && node == 0) return absl::OkStatus();
  return ErrnoError(errno, "mbind", name);
}

}  // namespace zeroshard
