#include "worker/memory_pins.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "device/cpu/memory_node.h"

namespace zeroshard {
namespace {

// The NUMA node of the cores that a worker computes on; -1 where it is not known.
int NodeOf(const CoreShare& cores) {
  const std::vector<int> cpus = cores.budget.Cpus(cores.budget.NodeOf(cores.holder));
  if (cpus.empty()) return -1;
  return NodeOfCpu(cpus.front()).value_or(-1);
}

std::string Where(const PinnedResult& result) {
  std::string text = result.node >= 0 ? absl::StrCat("node ", result.node)
                     : !result.node_reason.empty()
                         ? absl::StrCat("any node (", result.node_reason, ")")
                         : "any node";
  if (result.huge) absl::StrAppend(&text, ", huge pages");
  if (!result.huge_reason.empty()) {
    absl::StrAppend(&text, ", no huge pages (", result.huge_reason, ")");
  }
  return text;
}

}  // namespace

MemoryPins::MemoryPins(const internal::v1::WorkerStart& start,
                       const std::optional<CoreShare>& cores)
    : pin_(start.config().nvme().pin_memory()),
      require_(start.require_pinned()),
      huge_pages_(start.huge_pages()),
      tiered_(start.config().tiered()),
      worker_(start.worker()),
      node_(pin_ && cores.has_value() ? NodeOf(*cores) : -1) {}

absl::Status MemoryPins::PinStates(std::span<std::byte> region, uint64_t later_bytes) {
  PinOptions options;
  options.what = absl::StrCat("states of worker ", worker_);
  options.kind = MemoryKind::kMemoryFile;
  options.on_touch = true;
  // What is on the NVMe tier is given back by the page.
  options.huge_pages = huge_pages_ && !tiered_;
  options.later_bytes = later_bytes;
  return Pin(region, std::move(options));
}

absl::Status MemoryPins::PinStaging(std::span<std::byte> memory, std::atomic<uint64_t>& progress) {
  PinOptions options;
  options.what = absl::StrCat("staging memory of worker ", worker_);
  options.huge_pages = huge_pages_;
  options.progress = &progress;
  return Pin(memory, std::move(options));
}

absl::Status MemoryPins::Pin(std::span<std::byte> memory, PinOptions options) {
  if (!pin_) return absl::OkStatus();
  options.require = require_;
  options.node = node_;
  ZS_ASSIGN_OR_RETURN(const PinnedResult result, PinMemory(memory, options));
  pinned_bytes_ += result.locked_bytes;
  unpinned_bytes_ += result.unlocked_bytes;
  if (!result.warning.empty()) {
    // One is enough: what it advises helps them all.
    if (!std::exchange(warned_, true)) LogWarn(result.warning);
    return absl::OkStatus();
  }
  LogInfo(absl::StrCat(options.what, ": ", result.locked_bytes, " bytes are locked on ",
                       Where(result)));
  return absl::OkStatus();
}

}  // namespace zeroshard
