#include "worker/engine_context.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace zeroshard {

void LatencyHistogram::Add(absl::Duration latency) {
  const auto micros =
      static_cast<uint64_t>(std::max<int64_t>(0, absl::ToInt64Microseconds(latency)));
  ++buckets_[std::min<size_t>(std::bit_width(micros), kBuckets - 1)];
}

void EngineContext::RingAll() {
  constexpr uint64_t kOne = 1;
  for (uint32_t worker = 0; worker < memory_.workers(); ++worker) {
    const int doorbell = memory_.doorbell(worker);
    if (doorbell < 0) continue;
    // A full counter (EAGAIN) is a doorbell that rings already.
    [[maybe_unused]] const ssize_t written = write(doorbell, &kOne, sizeof(kOne));
  }
}

void EngineContext::MarkDirty(uint32_t unit) {
  for (uint32_t worker = 0; worker < memory_.workers(); ++worker) {
    board().dirty(worker)[unit / 64].fetch_or(uint64_t{1} << (unit % 64),
                                              std::memory_order_release);
  }
}

void EngineContext::MarkAllDirty() {
  for (uint32_t worker = 0; worker < memory_.workers(); ++worker) MarkAllDirty(worker);
}

void EngineContext::MarkAllDirty(uint32_t worker) {
  for (std::atomic<uint64_t>& word : board().dirty(worker)) {
    word.store(~uint64_t{0}, std::memory_order_release);
  }
}

void EngineContext::Poison(const absl::Status& status, uint64_t dead) {
  Poison(status, dead, /*nodes_lost=*/false);
}

void EngineContext::PoisonWithoutNodes(const absl::Status& status) {
  Poison(status, /*dead=*/0, /*nodes_lost=*/true);
}

void EngineContext::Poison(const absl::Status& status, uint64_t dead, bool nodes_lost) {
  BoardHeader& header = board().header();
  const uint64_t generation = std::max({uint64_t{1}, dead, header.generation.load()});
  uint64_t expected = header.poison_claim.load();
  if (expected >= generation ||
      !header.poison_claim.compare_exchange_strong(expected, generation)) {
    return;
  }
  const size_t length = std::min<size_t>(status.message().size(), kPoisonTextBytes - 1);
  std::memcpy(header.poison_text, status.message().data(), length);
  header.poison_text[length] = '\0';
  header.poisoned.store(generation << 8 | static_cast<uint64_t>(status.raw_code()),
                        std::memory_order_release);
  LogWarn(absl::StrCat("generation poisoned generation=", generation, " reason=\"",
                       status.message(), "\""));
  internal::v1::FromWorker message;
  message.mutable_poisoned()->set_generation(generation);
  message.mutable_poisoned()->set_code(static_cast<uint32_t>(status.raw_code()));
  message.mutable_poisoned()->set_message(std::string(status.message()));
  message.mutable_poisoned()->set_nodes_lost(nodes_lost);
  output_.ToServer(message);
  RingAll();
}

absl::Status EngineContext::poison() const {
  const BoardHeader& header = board().header();
  const uint64_t word = header.poisoned.load(std::memory_order_acquire);
  // Whoever dropped a generation need not clear what it died of, and a notice of it may come late.
  if (word == 0 || word >> 8 < header.generation.load(std::memory_order_acquire)) {
    return absl::OkStatus();
  }
  const size_t length = strnlen(header.poison_text, kPoisonTextBytes);
  return absl::Status(static_cast<absl::StatusCode>(word & 0xff),
                      absl::string_view(header.poison_text, length));
}

std::string EngineContext::UnitName(uint32_t unit) const {
  const std::vector<uint32_t>& parameters = layout().units()[unit].parameters;
  const ParameterSpec& first = layout().parameters()[parameters.front()];
  return absl::StrCat("unit ", unit, " (", first.module.empty() ? first.name : first.module, ")");
}

void EngineContext::CompareOrder(uint32_t rank, uint64_t attempt, uint64_t index, uint32_t unit) {
  const uint64_t mine = OrderEntry(attempt, index, unit);
  for (uint32_t other = 0; other < memory_.ranks(); ++other) {
    if (other == rank) continue;
    const uint64_t theirs = board().rank(other).order[index % kOrderRing].load();
    if (theirs >> 24 != mine >> 24 || theirs == mine) continue;
    const auto their_unit = static_cast<uint32_t>(theirs & 0xffffff);
    const bool first = rank < other;
    Poison(absl::FailedPreconditionError(absl::StrCat(
        "ranks gather in different orders: gather ", index, " of this step is ",
        UnitName(first ? unit : their_unit), " on rank ", std::min(rank, other), " but ",
        UnitName(first ? their_unit : unit), " on rank ", std::max(rank, other),
        "; modules that only some ranks use must be gathered alone (leaf_module, "
        "zeroshard.set_independent)")));
    return;
  }
}

bool EngineContext::IsConsumed(uint32_t rank, uint32_t unit, Tag tag) const {
  if (memory_.has_local_accumulators()) {
    return board().local(rank, unit).tag.load(std::memory_order_acquire) >= tag;
  }
  for (uint32_t worker = 0; worker < memory_.workers(); ++worker) {
    if (board().merged(worker, unit).tag.load(std::memory_order_acquire) < tag) return false;
  }
  return true;
}

}  // namespace zeroshard
