#include "client/completions.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/futex.h"

namespace zeroshard {
namespace {

// About the cost of going to sleep and being woken.
constexpr absl::Duration kSpin = absl::Microseconds(8);
constexpr int kResultAttempts = 1000;

using ResultWords = std::array<uint64_t, sizeof(StepResult) / sizeof(uint64_t)>;
static_assert(sizeof(ResultWords) == sizeof(StepResult));

}  // namespace

absl::Status Completions::Validate(const RankPage& page, uint64_t bytes) {
  if (bytes < sizeof(RankPage)) {
    return absl::DataLossError(absl::StrCat("the completion page has ", bytes,
                                            " bytes, expected at least ", sizeof(RankPage)));
  }
  if (page.magic != kRankPageMagic) {
    return absl::DataLossError(
        absl::StrCat("the completion page starts with ", absl::Hex(page.magic), ", expected ",
                     absl::Hex(kRankPageMagic), ": do daemon and client have the same version?"));
  }
  return absl::OkStatus();
}

absl::Status Completions::CheckUnused() const {
  for (uint32_t i = 0; i < kMaxPendingRequests; ++i) {
    const uint64_t slot = page_->slots[i].load(std::memory_order_relaxed);
    if (slot != 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the completion page still tells of request ", slot / 4, " of an earlier session"));
    }
  }
  return absl::OkStatus();
}

Completions::Outcome Completions::Look(uint64_t id) const {
  const uint64_t slot = page_->slots[id % kMaxPendingRequests].load(std::memory_order_acquire);
  if (slot / 4 < id) return Outcome::kPending;
  if (slot / 4 > id) return Outcome::kPast;
  return slot % 4 == RankPage::kOk ? Outcome::kOk : Outcome::kFailed;
}

absl::Status Completions::PoisonReason() const {
  const uint32_t code = page_->reason_code.load(std::memory_order_acquire);
  if (code == 0) return absl::OkStatus();
  const bool known = code <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
  return absl::Status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      std::string(page_->reason, strnlen(page_->reason, kReasonBytes)));
}

void Completions::Await(uint32_t ticket, absl::Duration at_most) const {
  FutexAwaitChange(page_->wake, ticket, at_most, kSpin);
}

void Completions::Nudge() const { FutexWakeAll(page_->wake); }

bool Completions::ReadStepResult(StepResult& result) const {
  const auto* source = reinterpret_cast<const uint64_t*>(&page_->result);
  for (int attempt = 0; attempt < kResultAttempts; ++attempt) {
    const uint64_t before = page_->result_version.load(std::memory_order_acquire);
    if (before % 2 != 0) continue;
    ResultWords words;
    for (size_t i = 0; i < words.size(); ++i) {
      words[i] = __atomic_load_n(source + i, __ATOMIC_RELAXED);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (page_->result_version.load(std::memory_order_relaxed) != before) continue;
    result = std::bit_cast<StepResult>(words);
    return true;
  }
  return false;
}

}  // namespace zeroshard
