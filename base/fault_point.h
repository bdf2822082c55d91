// Named fault points: places where a test can kill, stop, delay or fail the program.
//
//   ZS_FAULT_POINT("worker.step.before_apply");      // kill, stop, sleep
//   ZS_FAULT_STATUS("storage.journal.append");       // those, and return: the function fails
//
// Compiled to nothing unless the build has --define=faults=on (--config=faults), which a release
// never has. Every point in the binary registers itself before main(), so that a test can enumerate
// them and notice one that no test exercises. Points are armed with a specification, which
// base/config.h reads from ZEROSHARD_FAULTS:
//
//   specification = point { ";" point }
//   point         = NAME "=" action
//   action        = "kill" [":" K]         SIGKILL to itself at the K-th hit (default 1)
//                 | "stop" [":" K]         SIGSTOP to itself at the K-th hit (default 1)
//                 | "sleep" ":" MS [":" K] sleeps at the K-th hit, or at every hit
//                 | "return" [":" K]       fails with Unavailable at the K-th hit, or at every hit
//
// Names that this binary does not have are accepted: one specification serves several programs.
// Thread-safe. A name may be used in several places; they are one point.

#ifndef ZEROSHARD_BASE_FAULT_POINT_H_
#define ZEROSHARD_BASE_FAULT_POINT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace zeroshard {

// Arms points in addition to those armed before. InvalidArgument on a malformed specification (then
// nothing is armed); FailedPrecondition for a non-empty one in a build without fault points.
absl::Status ArmFaultPoints(std::string_view specification);

// Disarms all and sets all hit counts to zero.
void ResetFaultPoints();

// The sorted names of all points in this binary; empty in a build without them.
std::vector<std::string> FaultPointNames();

// How often the point was hit since the start or the last reset.
uint64_t FaultPointHits(std::string_view name);

namespace fault_internal {

// Registers a name; called before main().
bool RegisterFaultPoint(const char* name);

// Counts the hit and does what is armed. Not OK only for "return".
absl::Status HitFaultPoint(const char* name);

// The name as a template argument, so that each name is one static object initialised before
// main().
template <size_t N>
struct FaultName {
  char text[N];
  constexpr FaultName(const char (&literal)[N]) {  // NOLINT(google-explicit-constructor)
    std::copy_n(literal, N, text);
  }
};

template <FaultName kName>
struct FaultPoint {
  static inline const bool kRegistered = RegisterFaultPoint(kName.text);
  static absl::Status Hit() {
    static_cast<void>(&kRegistered);
    return HitFaultPoint(kName.text);
  }
};

}  // namespace fault_internal
}  // namespace zeroshard

#ifdef ZEROSHARD_FAULTS

#define ZS_FAULT_POINT(name) static_cast<void>(::zeroshard::fault_internal::FaultPoint<name>::Hit())

// In a function that returns absl::Status or absl::StatusOr.
#define ZS_FAULT_STATUS(name)                                                          \
  do {                                                                                 \
    if (absl::Status zs_fault_ = ::zeroshard::fault_internal::FaultPoint<name>::Hit(); \
        !zs_fault_.ok()) {                                                             \
      return zs_fault_;                                                                \
    }                                                                                  \
  } while (false)

#else

#define ZS_FAULT_POINT(name) static_cast<void>(0)
#define ZS_FAULT_STATUS(name) static_cast<void>(0)

#endif  // ZEROSHARD_FAULTS

#endif  // ZEROSHARD_BASE_FAULT_POINT_H_
