#include "server/node_memory.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace zeroshard {
namespace {

std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  uint64_t value = 0;
  if (!(file >> text) || !absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

std::map<std::string, uint64_t> ReadMeminfo(const std::string& path) {
  std::map<std::string, uint64_t> values;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string key;
    uint64_t kib = 0;
    if (words >> key >> kib) values[key] = kib * 1024;
  }
  return values;
}

// The line of the unified hierarchy, "0::/system.slice/zeroshardd.service".
std::string ControlGroup(const std::string& root) {
  std::ifstream file(root + "proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "/";
}

// The regions' memory by kind: what the message of a refusal is made of.
std::string SumByKind(const JobPlan& plan) {
  std::map<std::string, uint64_t> sums;
  for (const model::v1::LedgerLine& line : plan.ledger) {
    if (line.tier() != "nvme") sums[line.state()] += line.bytes();
  }
  std::vector<std::pair<std::string, uint64_t>> sorted(sums.begin(), sums.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<std::string> parts;
  for (const auto& [state, bytes] : sorted) {
    parts.push_back(absl::StrCat(state, " ", HumanBytes(bytes)));
  }
  return absl::StrJoin(parts, " + ");
}

// What stands against a job that needs so much, `more` of which it does not use yet; "" for
// nothing.
std::string Against(uint64_t need, uint64_t more, const NodeMemory& node, uint64_t limit,
                    const MemoryInUse& in_use) {
  const uint64_t available = node.available - std::min(node.available, in_use.untouched);
  if (limit > 0 && in_use.held + need > limit) {
    return absl::StrCat("host_memory_limit is ", HumanBytes(limit), ", of which other jobs hold ",
                        HumanBytes(in_use.held));
  }
  if (more <= available) return "";
  return absl::StrCat("this node has ", HumanBytes(available), " left (", node.source, " ",
                      HumanBytes(node.available), ", of which other jobs have yet to use ",
                      HumanBytes(in_use.untouched), ")");
}

}  // namespace

std::string HumanBytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return absl::StrCat(bytes, " B");
  return absl::StrFormat("%.2f %s", value, kUnits[unit]);
}

absl::StatusOr<NodeMemory> ReadNodeMemory(const std::string& root) {
  const std::string meminfo = root + "proc/meminfo";
  const std::map<std::string, uint64_t> values = ReadMeminfo(meminfo);
  if (values.count("MemTotal:") == 0 || values.count("MemAvailable:") == 0) {
    return absl::UnavailableError(absl::StrCat(meminfo, " has no MemTotal and MemAvailable"));
  }
  NodeMemory memory{values.at("MemTotal:"), values.at("MemAvailable:"), "MemAvailable"};
  const std::string group = root + "sys/fs/cgroup" + ControlGroup(root) + "/";
  const std::optional<uint64_t> max = ReadNumber(group + "memory.max");
  const std::optional<uint64_t> current = ReadNumber(group + "memory.current");
  if (max && current) {
    const uint64_t left = *max - std::min(*max, *current);
    if (left < memory.available) {
      memory = {std::min(*max, memory.total), left, "memory.max of the control group"};
    }
  }
  return memory;
}

absl::Status CheckMemory(const std::string& job, const JobPlan& plan, const NodeMemory& node,
                         uint64_t limit, const MemoryInUse& in_use) {
  const uint64_t need = plan.memory_bytes();
  const std::string against = Against(need, need, node, limit, in_use);
  if (against.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "job '", job, "' needs ", HumanBytes(need), " of host memory, but ", against, "; the sum is ",
      SumByKind(plan), ". Use a higher stage, fewer or smaller parameters, or more nodes"));
}

absl::Status CheckGrowth(const std::string& job, const MemoryGrowth& growth, const NodeMemory& node,
                         uint64_t limit, const MemoryInUse& in_use) {
  const uint64_t need = growth.next->memory_bytes();
  const uint64_t own_limit = growth.next->host_limit;
  if (need <= growth.plan->memory_bytes()) return absl::OkStatus();
  const uint64_t more = need - std::min(need, growth.touched);
  std::string against;
  if (own_limit > 0 && need > own_limit) {
    against = absl::StrCat("its host_limit is ", HumanBytes(own_limit));
  } else {
    against = Against(need, more, node, limit, in_use);
  }
  if (against.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "job '", job, "' would need ", HumanBytes(need), " of host memory, ", HumanBytes(more),
      " more than it uses, but ", against, ". Move fewer units, or end other jobs"));
}

}  // namespace zeroshard
