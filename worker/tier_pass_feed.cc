// What the work of a pass needs beside the images, and what it makes that goes elsewhere.
#include "worker/tier_pass.h"

namespace zeroshard {

void TierPass::Feed() {
  while (error_.ok() && !unfed_.empty()) {
    const absl::StatusOr<bool> begun = feed_->Begin(*unfed_.front()->item);
    if (!begun.ok()) return Fail(begun.status());
    if (!*begun) return;
    unfed_.front()->fed = true;
    unfed_.pop_front();
  }
}

bool TierPass::HasCome(const Entry& entry) {
  if (feed_ == nullptr || entry.worked) return true;
  if (!entry.fed) return false;
  const absl::StatusOr<bool> come = feed_->HasCome(*entry.item);
  if (!come.ok()) Fail(come.status());
  return come.ok() && *come;
}

absl::Status TierPass::Complete(const Entry& entry, const Target& target) {
  // A pass that is run again passes over images that are complete.
  if (entry.left) {
    if (absl::Status status = feed_->Arrive(*entry.item); !status.ok()) {
      store_.Release(target.place.image.slot);
      return status;
    }
  }
  return store_.Complete(target.image, target.written);
}

}  // namespace zeroshard
