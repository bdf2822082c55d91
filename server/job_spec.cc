// The comparison of what ranks say of their job, and the names of the phases.
#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job.h"

namespace zeroshard {
namespace {

// "key = value" lines of a that b lacks.
std::vector<std::string> Missing(const std::vector<std::string>& a,
                                 const std::vector<std::string>& b) {
  std::vector<std::string> sorted_a = a, sorted_b = b, only;
  std::sort(sorted_a.begin(), sorted_a.end());
  std::sort(sorted_b.begin(), sorted_b.end());
  std::set_difference(sorted_a.begin(), sorted_a.end(), sorted_b.begin(), sorted_b.end(),
                      std::back_inserter(only));
  return only;
}

std::string Numbers(const char* what, uint64_t a, const std::string& a_name, uint64_t b,
                    const std::string& b_name) {
  if (a == b) return "";
  return absl::StrCat(what, " is ", a, " on ", a_name, " but ", b, " on ", b_name);
}

std::string ParameterDifference(const JobSpec& a, const std::string& a_name, const JobSpec& b,
                                const std::string& b_name) {
  const size_t common = std::min(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < common; ++i) {
    if (a.parameters[i] == b.parameters[i]) continue;
    return absl::StrCat("parameter ", i, " is ", a.parameters[i], " on ", a_name, " but ",
                        b.parameters[i], " on ", b_name);
  }
  return Numbers("the number of parameters", a.parameters.size(), a_name, b.parameters.size(),
                 b_name);
}

std::string ConfigDifference(const JobSpec& a, const std::string& a_name, const JobSpec& b,
                             const std::string& b_name) {
  constexpr size_t kShown = 5;
  std::vector<std::string> in_a = Missing(a.config, b.config);
  std::vector<std::string> in_b = Missing(b.config, a.config);
  if (in_a.empty() && in_b.empty()) return "";
  in_a.resize(std::min(in_a.size(), kShown));
  in_b.resize(std::min(in_b.size(), kShown));
  return absl::StrCat("the config has {", absl::StrJoin(in_a, ", "), "} on ", a_name, " but {",
                      absl::StrJoin(in_b, ", "), "} on ", b_name);
}

}  // namespace

std::string Difference(const JobSpec& a, const std::string& a_name, const JobSpec& b,
                       const std::string& b_name) {
  if (a == b) return "";
  for (const std::string& text :
       {Numbers("world_size", a.world_size, a_name, b.world_size, b_name),
        Numbers("local_ranks", a.local_ranks, a_name, b.local_ranks, b_name),
        Numbers("forward_only", a.forward_only, a_name, b.forward_only, b_name),
        ParameterDifference(a, a_name, b, b_name), ConfigDifference(a, a_name, b, b_name)}) {
    if (!text.empty()) return text;
  }
  return "the order of the config's values";
}

std::string JobPhaseName(JobPhase phase) {
  switch (phase) {
    case JobPhase::kForming:
      return "forming";
    case JobPhase::kStarting:
      return "starting";
    case JobPhase::kReady:
      return "ready";
    case JobPhase::kIdle:
      return "idle";
    case JobPhase::kLeaving:
      return "leaving";
    case JobPhase::kFailed:
      return "failed";
    case JobPhase::kEnded:
      return "ended";
  }
  return "unknown";
}

std::string RankPhaseName(RankPhase phase) {
  switch (phase) {
    case RankPhase::kAbsent:
      return "absent";
    case RankPhase::kWaiting:
      return "waiting";
    case RankPhase::kAttached:
      return "attached";
    case RankPhase::kDead:
      return "dead";
    case RankPhase::kDetached:
      return "detached";
  }
  return "unknown";
}

std::string WorkerPhaseName(WorkerPhase phase) {
  switch (phase) {
    case WorkerPhase::kNone:
      return "not started";
    case WorkerPhase::kStarting:
      return "starting";
    case WorkerPhase::kReady:
      return "ready";
    case WorkerPhase::kDead:
      return "dead";
  }
  return "unknown";
}

}  // namespace zeroshard
