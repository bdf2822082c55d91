#include "worker/nvme_tier.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "worker/tier_mover.h"
#include "worker/tier_pass.h"
#include "worker/tier_store.h"

namespace zeroshard {

class NvmeTier::Impl {
 public:
  explicit Impl(NvmeTierOptions options) : options_(std::move(options)) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  absl::Status Init(const NvmePlan& plan);
  absl::Status Run(std::span<const TierItem> items, TierWork work, TierFeed* feed);
  absl::Status Seal(const std::string& extra, uint64_t revision);

  TierStore& store() { return *store_; }
  TierCounters counters() const;
  std::string description() const;

 private:
  const NvmeTierOptions options_;
  TierCounters counters_;
  std::unique_ptr<TierStore> store_;
  std::unique_ptr<TierMover> mover_;
};

NvmeTier::Impl::~Impl() {
  if (mover_ == nullptr) return;
  mover_->Settle();
  if (mover_->held()) store_->Abandon();
}

absl::Status NvmeTier::Impl::Init(const NvmePlan& plan) {
  ZS_ASSIGN_OR_RETURN(store_, TierStore::Open(plan, options_));
  mover_ = std::make_unique<TierMover>(plan, options_, store_->fds());
  return mover_->Prepare();
}

absl::Status NvmeTier::Impl::Run(std::span<const TierItem> items, TierWork work, TierFeed* feed) {
  const absl::Duration begin = SystemClock().Elapsed();
  ZS_RETURN_IF_ERROR(mover_->Prepare());
  store_->ForgiveIfExhausted();
  const absl::Status status =
      TierPass({*store_, *mover_, options_, counters_, feed}, items, work).Run();
  if (mover_->failed()) mover_->Settle();
  counters_.passes += SystemClock().Elapsed() - begin;
  return status;
}

absl::Status NvmeTier::Impl::Seal(const std::string& extra, uint64_t revision) {
  const absl::Duration begin = SystemClock().Elapsed();
  const absl::Status status = store_->Seal([this] { return mover_->Sync(); }, extra, revision);
  counters_.seals += SystemClock().Elapsed() - begin;
  if (mover_->failed()) mover_->Settle();
  return status;
}

TierCounters NvmeTier::Impl::counters() const {
  TierCounters counters = counters_;
  counters.paths.assign(mover_->counters().begin(), mover_->counters().end());
  return counters;
}

std::string NvmeTier::Impl::description() const {
  std::string text = mover_->description();
  for (const std::string& warning : store_->warnings()) absl::StrAppend(&text, "; ", warning);
  return text;
}

NvmeTier::NvmeTier(const NvmePlan& plan, std::unique_ptr<Impl> impl)
    : plan_(plan), impl_(std::move(impl)) {}

NvmeTier::~NvmeTier() = default;

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(const NvmePlan& plan,
                                                         NvmeTierOptions options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  ZS_RETURN_IF_ERROR(impl->Init(plan));
  return std::unique_ptr<NvmeTier>(new NvmeTier(plan, std::move(impl)));
}

absl::StatusOr<TierRemains> NvmeTier::Inspect(const NvmePlan& plan,
                                              const NvmeTierOptions& options) {
  return TierStore::Inspect(plan, options);
}

uint64_t NvmeTier::StagingBytes(const NvmePlan& plan, const NvmeTierOptions& options) {
  return TierMover::StagingImages(plan, options) * plan.max_image_bytes();
}

bool NvmeTier::Holds(uint32_t image) const { return impl_->store().Holds(image); }
bool NvmeTier::AtHome(uint32_t image) const { return impl_->store().AtHome(image); }
void NvmeTier::SetTarget(uint32_t image, NvmeTarget target) {
  impl_->store().SetTarget(image, target);
}

absl::Status NvmeTier::Begin(uint64_t attempt, uint64_t step) {
  return impl_->store().Begin(attempt, step);
}
bool NvmeTier::Prepared(uint32_t image) const { return impl_->store().Prepared(image); }

absl::Status NvmeTier::Run(std::span<const TierItem> items, Work work, TierFeed* feed) {
  return impl_->Run(items, work, feed);
}

absl::Status NvmeTier::Seal(const std::string& extra, uint64_t revision) {
  return impl_->Seal(extra, revision);
}
bool NvmeTier::NeedsSeal(uint64_t revision) const { return impl_->store().NeedsSeal(revision); }
const std::string& NvmeTier::resumed_extra() const { return impl_->store().resumed_extra(); }
absl::Status NvmeTier::ConfirmResume() { return impl_->store().ConfirmResume(); }
absl::Status NvmeTier::Commit(uint64_t attempt) { return impl_->store().Commit(attempt); }
absl::Status NvmeTier::Forget(uint32_t image) { return impl_->store().Forget(image); }
void NvmeTier::Tick() { impl_->store().Tick(); }
TierCounters NvmeTier::counters() const { return impl_->counters(); }
std::string NvmeTier::description() const { return impl_->description(); }

}  // namespace zeroshard
