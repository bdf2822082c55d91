#include "transport/mesh_rendezvous.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// Between two looks whether an epoch is over.
constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);

std::string Key(uint64_t epoch, const std::string& name) {
  return absl::StrCat("mesh/", epoch, "/", name);
}

std::string Joined(uint64_t epoch, uint32_t worker) {
  return Key(epoch, absl::StrCat("joined_", worker));
}

}  // namespace

std::string RendezvousOptions::NameOf(uint32_t peer) const {
  return peer < names.size() ? names[peer] : absl::StrCat("worker ", peer);
}

uint64_t MeshRendezvous::FirstUnusedEpoch() {
  uint64_t epoch = 1;
  while (!stopping_.load()) {
    const absl::StatusOr<std::string> joined =
        store_.Get(Joined(epoch, options_.worker), absl::ZeroDuration());
    if (joined.ok()) {
      ++epoch;
    } else if (absl::IsUnavailable(joined.status())) {
      report_(joined.status());
      absl::SleepFor(kRetryDelay);
    } else {
      return epoch;  // not set; or Join will say what is wrong
    }
  }
  return epoch;
}

absl::Status MeshRendezvous::Join(uint64_t epoch) {
  if (epoch > 1) ZS_RETURN_IF_ERROR(store_.Set(Key(epoch - 1, "over"), "1"));
  ZS_RETURN_IF_ERROR(store_.Set(Joined(epoch, options_.worker), options_.fingerprint));
  for (uint32_t peer = 0; peer < options_.workers; ++peer) {
    ZS_ASSIGN_OR_RETURN(const std::string joined,
                        AwaitFor(epoch, Joined(epoch, peer), options_.NameOf(peer)));
    if (joined == options_.fingerprint) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(options_.NameOf(peer), " is not of the same job and build: it has {", joined,
                     "}, ", options_.NameOf(options_.worker), " has {", options_.fingerprint, "}"));
  }
  // What was found there may be of processes that have died.
  if (IsOver(epoch)) return absl::AbortedError("the others have gone on");
  return absl::OkStatus();
}

absl::StatusOr<std::string> MeshRendezvous::Await(uint64_t epoch, const std::string& key) {
  return AwaitFor(epoch, key, absl::StrCat("key ", key));
}

absl::StatusOr<std::string> MeshRendezvous::AwaitFor(uint64_t epoch, const std::string& key,
                                                     const std::string& whom) {
  bool reported = false;
  for (absl::Duration left = options_.timeout; left > absl::ZeroDuration(); left -= kSlice) {
    absl::StatusOr<std::string> value = store_.Get(key, std::min(left, kSlice));
    if (!absl::IsDeadlineExceeded(value.status())) return value;
    if (stopping_.load()) return absl::CancelledError("the mesh ends");
    if (IsOver(epoch)) return absl::AbortedError("the others have gone on");
    if (!reported) report_(absl::UnavailableError(absl::StrCat("waiting for ", whom)));
    reported = true;
  }
  return absl::AbortedError(
      absl::StrCat(whom, " did not come within ", absl::FormatDuration(options_.timeout)));
}

bool MeshRendezvous::IsOver(uint64_t epoch) {
  return store_.Get(Key(epoch, "over"), absl::ZeroDuration()).ok();
}

}  // namespace zeroshard
