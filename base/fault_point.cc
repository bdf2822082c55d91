#include "base/fault_point.h"

#include <csignal>
#include <map>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

enum class Kind { kKill, kStop, kSleep, kReturn };

struct Action {
  Kind kind;
  std::optional<uint64_t> at_hit;  // unset: at every hit
  absl::Duration sleep;
};

struct Point {
  bool registered = false;
  uint64_t hits = 0;
  std::optional<Action> action;
};

// Points register before main(), in any order, so the registry is made at first use; it is never
// destroyed because points may be hit until the process ends.
struct Registry {
  absl::Mutex mu;
  std::map<std::string, Point, std::less<>> points ABSL_GUARDED_BY(mu);
};

Registry& GetRegistry() {
  static Registry* const kRegistry = new Registry;
  return *kRegistry;
}

absl::Status Malformed(std::string_view part) {
  return absl::InvalidArgumentError(
      absl::StrCat("fault point \"", Abs(part),
                   "\": expected NAME=kill[:K], stop[:K], sleep:MS[:K] or return[:K]"));
}

absl::StatusOr<Action> ParseAction(std::string_view part, std::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(Abs(text), ':');
  std::vector<uint64_t> numbers;
  for (size_t i = 1; i < words.size(); ++i) {
    uint64_t number = 0;
    if (!absl::SimpleAtoi(words[i], &number)) return Malformed(part);
    numbers.push_back(number);
  }
  Action action = {};
  size_t used = 0;
  if (words[0] == "kill") {
    action = {Kind::kKill, 1, {}};
  } else if (words[0] == "stop") {
    action = {Kind::kStop, 1, {}};
  } else if (words[0] == "return") {
    action = {Kind::kReturn, std::nullopt, {}};
  } else if (words[0] == "sleep" && !numbers.empty()) {
    action = {Kind::kSleep, std::nullopt, absl::Milliseconds(numbers[0])};
    used = 1;
  } else {
    return Malformed(part);
  }
  if (numbers.size() > used + 1) return Malformed(part);
  if (numbers.size() == used + 1) {
    if (numbers[used] == 0) return Malformed(part);
    action.at_hit = numbers[used];
  }
  return action;
}

absl::StatusOr<std::map<std::string, Action>> ParseSpecification(std::string_view specification) {
  std::map<std::string, Action> actions;
  for (const std::string& part :
       std::vector<std::string>(absl::StrSplit(Abs(specification), ';', absl::SkipWhitespace()))) {
    const std::vector<std::string> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
    const std::string name(absl::StripAsciiWhitespace(sides[0]));
    if (sides.size() != 2 || name.empty()) return Malformed(part);
    const absl::StatusOr<Action> action =
        ParseAction(part, Std(absl::StripAsciiWhitespace(sides[1])));
    if (!action.ok()) return action.status();
    actions[name] = *action;
  }
  return actions;
}

}  // namespace

absl::Status ArmFaultPoints(std::string_view specification) {
  const auto actions = ParseSpecification(specification);
  if (!actions.ok()) return actions.status();
#ifndef ZEROSHARD_FAULTS
  if (!actions->empty()) {
    return absl::FailedPreconditionError(
        "fault points were asked for, but this build has none: build with --config=faults");
  }
#endif
  Registry& registry = GetRegistry();
  absl::MutexLock lock(&registry.mu);
  for (const auto& [name, action] : *actions) registry.points[name].action = action;
  return absl::OkStatus();
}

void ResetFaultPoints() {
  Registry& registry = GetRegistry();
  absl::MutexLock lock(&registry.mu);
  for (auto& [name, point] : registry.points) {
    point.hits = 0;
    point.action.reset();
  }
}

std::vector<std::string> FaultPointNames() {
  Registry& registry = GetRegistry();
  absl::MutexLock lock(&registry.mu);
  std::vector<std::string> names;
  for (const auto& [name, point] : registry.points) {
    if (point.registered) names.push_back(name);
  }
  return names;
}

uint64_t FaultPointHits(std::string_view name) {
  Registry& registry = GetRegistry();
  absl::MutexLock lock(&registry.mu);
  const auto found = registry.points.find(name);
  return found == registry.points.end() ? 0 : found->second.hits;
}

namespace fault_internal {

bool RegisterFaultPoint(const char* name) {
  Registry& registry = GetRegistry();
  absl::MutexLock lock(&registry.mu);
  registry.points[name].registered = true;
  return true;
}

absl::Status HitFaultPoint(const char* name) {
  Registry& registry = GetRegistry();
  std::optional<Action> action;
  {
    absl::MutexLock lock(&registry.mu);
    Point& point = registry.points[name];
    ++point.hits;
    if (point.action && point.action->at_hit.value_or(point.hits) == point.hits) {
      action = point.action;
    }
  }
  if (!action) return absl::OkStatus();
  switch (action->kind) {
    case Kind::kKill:
      std::raise(SIGKILL);
      break;
    case Kind::kStop:
      std::raise(SIGSTOP);
      break;
    case Kind::kSleep:
      absl::SleepFor(action->sleep);
      break;
    case Kind::kReturn:
      return absl::UnavailableError(absl::StrCat("injected failure at fault point ", name));
  }
  return absl::OkStatus();
}

}  // namespace fault_internal
}  // namespace zeroshard
