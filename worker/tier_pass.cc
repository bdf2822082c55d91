#include "worker/tier_pass.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/fault_point.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// Reads of an image that fail before the pass does.
constexpr int kMaxReads = 3;
constexpr absl::Duration kSlice = absl::Milliseconds(50);
constexpr absl::Duration kDrainSlice = absl::Milliseconds(5);
constexpr absl::Duration kFeedSlice = absl::Microseconds(200);

absl::Duration Now() { return SystemClock().Elapsed(); }

}  // namespace

TierPass::TierPass(const TierPassContext& context, std::span<const TierItem> items, TierWork work)
    : store_(context.store),
      mover_(context.mover),
      options_(context.options),
      counters_(context.counters),
      feed_(context.feed),
      items_(items),
      work_(work),
      lanes_(options_.pool == nullptr ? 1 : static_cast<size_t>(options_.pool->lanes())),
      entries_(std::min({items.size(), size_t{mover_.buffers()}, EntryLimit()})) {
  for (Entry& entry : entries_) free_entries_.push_back(&entry);
  for (uint32_t i = 0; i < mover_.buffers(); ++i) free_buffers_.push_back(i);
}

size_t TierPass::BatchLimit() const {
  const uint64_t image_bytes = std::max<uint64_t>(1, store_.plan().max_image_bytes());
  return lanes_ * std::clamp<uint64_t>(options_.one_lane_bytes / image_bytes, 1, 4);
}

size_t TierPass::EntryLimit() const {
  if (options_.cache_bytes == 0) return mover_.buffers();
  const uint64_t image_bytes = std::max<uint64_t>(1, store_.plan().max_image_bytes());
  const uint64_t block_bytes = std::max<uint64_t>(1, options_.config.block_bytes());
  const uint64_t blocks = (image_bytes + block_bytes - 1) / block_bytes;
  const uint64_t depth = uint64_t{2} * options_.config.queue_depth();
  const uint64_t needed = (depth + blocks - 1) / blocks + 2 * BatchLimit();
  return std::max<uint64_t>(needed, options_.cache_bytes / image_bytes);
}

absl::Status TierPass::Run() {
  while (true) {
    if (error_.ok()) Admit();
    Feed();
    if (next_ == items_.size() && free_entries_.size() == entries_.size()) break;
    Wait();
    Compute();
    if (!error_.ok()) {
      next_ = items_.size();
      unfed_.clear();
      DropIdle();
    }
  }
  return error_;
}

bool TierPass::Done(const TierItem& item) const {
  if (!item.rewrite && item.write == kNoImage) return false;
  return (!item.rewrite || store_.Prepared(item.read)) &&
         (item.write == kNoImage || store_.Prepared(item.write));
}

void TierPass::Admit() {
  const bool busy = !options_.config.pipeline_read() && reading_ + ready_.size() > 0;
  for (size_t admitted = 0; next_ < items_.size() && !busy; ++next_) {
    const TierItem& item = items_[next_];
    if (Done(item)) continue;
    const size_t buffers = (item.read != kNoImage ? 1 : 0) + (item.write != kNoImage ? 1 : 0);
    if (free_entries_.empty() || free_buffers_.size() < buffers) return;
    if (!options_.config.pipeline_read() && admitted == lanes_) return;
    ++admitted;
    if (const absl::Status status = AdmitOne(item); !status.ok()) return Fail(status);
  }
}

absl::Status TierPass::AdmitOne(const TierItem& item) {
  for (const uint32_t image : {item.read, item.write}) {
    const auto images = store_.plan().images();
    if (image == kNoImage || (image < images.size() && images[image].elements > 0)) continue;
    return absl::InvalidArgumentError(absl::StrCat("image ", image, " has no place on the tier"));
  }
  if (item.read == kNoImage && (item.rewrite || item.write == kNoImage)) {
    return absl::InvalidArgumentError("an item of a pass that rewrites what it does not read");
  }
  TierPlace source;
  if (item.read != kNoImage) {
    ZS_ASSIGN_OR_RETURN(source, store_.Locate(item.read));
  }
  Entry& entry = *free_entries_.back();
  free_entries_.pop_back();
  entry = Entry();
  entry.item = &item;
  entry.source = source;
  if (item.read != kNoImage) TakeBuffer(entry, entry.bytes.read);
  if (item.write != kNoImage) TakeBuffer(entry, entry.bytes.write);
  if (item.rewrite && !store_.Prepared(item.read)) {
    entry.targets[0].SetUp(item.read, entry.bytes.read);
  }
  if (item.write != kNoImage && !store_.Prepared(item.write)) {
    entry.targets[1].SetUp(item.write, entry.bytes.write);
  }
  if (feed_ != nullptr) unfed_.push_back(&entry);
  if (item.read != kNoImage) {
    StartRead(entry);
  } else {
    ready_.push_back(&entry);
  }
  return absl::OkStatus();
}

void TierPass::TakeBuffer(Entry& entry, std::byte*& memory) {
  entry.buffers[entry.buffer_count++] = free_buffers_.back();
  memory = mover_.buffer(free_buffers_.back());
  free_buffers_.pop_back();
}

void TierPass::StartRead(Entry& entry) {
  entry.read.operation = IoOperation::kRead;
  entry.read.path = entry.source.path;
  entry.read.offset = entry.source.offset;
  entry.read.memory = entry.bytes.read;
  entry.read.bytes = store_.plan().shape(entry.item->read).image_bytes();
  ++reading_;
  mover_.Start(&entry.read);
}

bool TierPass::MayCompute() const {
  return error_.ok() && !ready_.empty() && (options_.config.pipeline_write() || writing_ == 0) &&
         (options_.config.pipeline_read() || reading_ == 0);
}

bool TierPass::Compute() {
  if (!MayCompute()) return false;
  const std::vector<Entry*> batch = NextBatch();
  if (batch.empty()) return false;
  if (options_.pool == nullptr) {
    for (Entry* entry : batch) RunLane(*entry);
  } else {
    const bool small = batch.size() * store_.plan().max_image_bytes() <= options_.one_lane_bytes;
    const size_t parts = small ? 1 : std::min(batch.size(), lanes_);
    options_.pool->ParallelFor(parts, [&](size_t part, int) {
      for (size_t i = part; i < batch.size(); i += parts) RunLane(*batch[i]);
    });
  }
  for (Entry* entry : batch) AfterLane(*entry);
  return true;
}

std::vector<TierPass::Entry*> TierPass::NextBatch() {
  std::vector<Entry*> batch;
  bool blocked = false;
  const size_t limit = BatchLimit();
  for (size_t i = 0; i < ready_.size() && batch.size() < limit && error_.ok();) {
    Entry* entry = ready_[i];
    if (!HasCome(*entry)) {
      starved_ = true;
      ++i;
      continue;
    }
    if (!ReserveSlots(*entry)) {
      blocked = true;
      ++i;
      continue;
    }
    batch.push_back(entry);
    ready_.erase(ready_.begin() + static_cast<ptrdiff_t>(i));
  }
  if (!blocked) blocked_since_.reset();
  starved_ &= batch.empty();
  return batch;
}

bool TierPass::ReserveSlots(Entry& entry) {
  for (Target& target : entry.targets) {
    if (target.state != Output::kNoSlot) continue;
    absl::StatusOr<TierPlace> place = store_.Reserve(target.image);
    if (!place.ok()) {
      const absl::Status status = NoSlot(place.status());
      if (!status.ok()) Fail(status);
      return false;
    }
    target.place = *std::move(place);
    target.state = Output::kReserved;
  }
  return true;
}

// OK to wait: a dead predecessor's transfers will end.
absl::Status TierPass::NoSlot(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  if (!store_.CanWait()) {
    return write_error_.ok() ? status : Annotate(write_error_, "no slot is left to write to again");
  }
  if (!blocked_since_.has_value()) blocked_since_ = Now();
  return Now() - *blocked_since_ > options_.io_timeout ? status : absl::OkStatus();
}

void TierPass::RunLane(Entry& entry) const {
  const absl::Duration begin = Now();
  const NvmePlan& plan = store_.plan();
  if (!entry.worked) {
    if (entry.bytes.read != nullptr) {
      entry.status = store_.Verify(
          entry.item->read, entry.source,
          {entry.bytes.read, static_cast<size_t>(plan.shape(entry.item->read).image_bytes())});
      entry.damaged = !entry.status.ok();
    }
    if (entry.status.ok()) entry.status = work_(*entry.item, entry.bytes);
    entry.worked = entry.status.ok();
  }
  for (Target& target : entry.targets) {
    if (!entry.worked || target.state != Output::kReserved) continue;
    target.written =
        store_.Encode(target.image, target.place,
                      {target.memory, static_cast<size_t>(plan.shape(target.image).image_bytes())});
  }
  entry.compute = Now() - begin;
}

void TierPass::AfterLane(Entry& entry) {
  counters_.compute += entry.compute;
  if (entry.damaged) return OnDamage(entry);
  if (!entry.status.ok()) {
    ready_.push_back(&entry);  // freed with the others
    return Fail(entry.status);
  }
  if (entry.fed && !std::exchange(entry.left, true)) {
    if (const absl::Status status = feed_->Leave(*entry.item); !status.ok()) {
      ready_.push_back(&entry);
      return Fail(status);
    }
  }
  StartWrites(entry);
  FreeIfDone(entry);
}

// What was read may have been changed on its way.
void TierPass::OnDamage(Entry& entry) {
  entry.damaged = false;
  if (!std::exchange(entry.read_again, true)) {
    ++counters_.retries;
    entry.status = absl::OkStatus();
    return StartRead(entry);
  }
  ++counters_.damaged_images;
  store_.Damaged(entry.source.image.slot);
  ready_.push_back(&entry);
  Fail(entry.status);
}

void TierPass::StartWrites(Entry& entry) {
  for (Target& target : entry.targets) {
    if (target.state != Output::kReserved) continue;
    ZS_FAULT_POINT("worker.tier.before_write");
    target.state = Output::kWriting;
    target.move.operation = IoOperation::kWrite;
    target.move.path = target.place.path;
    target.move.offset = target.place.offset;
    target.move.memory = target.memory;
    target.move.bytes = store_.plan().shape(target.image).image_bytes();
    ++writing_;
    mover_.Start(&target.move);
  }
}

void TierPass::Wait() {
  const bool blocked = blocked_since_.has_value();
  const bool starved = std::exchange(starved_, false);
  const bool idle = blocked || starved || !MayCompute();
  if (!error_.ok()) {
    for (TierMove* move : mover_.Withdraw()) OnWithdrawn(move);
  }
  const absl::Duration begin = Now();
  const absl::Duration wait = starved ? kFeedSlice : blocked ? kDrainSlice : kSlice;
  std::vector<TierMove*> ended = mover_.Turn(idle ? wait : absl::ZeroDuration());
  if (idle) counters_.waiting += Now() - begin;
  // Drives often end all that they were given at once. What takes its place is begun before this
  // thread computes, or they would stand still meanwhile.
  while (!ended.empty()) {
    for (TierMove* move : ended) OnEnded(move);
    if (!error_.ok()) break;
    Admit();
    Feed();
    ended = mover_.Turn(absl::ZeroDuration());
  }
  if (idle) {
    store_.Tick();
    options_.beat();
  }
}

// Which entry a move belongs to is found by its address.
TierPass::Entry& TierPass::EntryOf(const TierMove* move) {
  const auto* begin = reinterpret_cast<const std::byte*>(entries_.data());
  const auto at = reinterpret_cast<const std::byte*>(move) - begin;
  return entries_[static_cast<size_t>(at) / sizeof(Entry)];
}

void TierPass::OnEnded(TierMove* move) {
  Entry& entry = EntryOf(move);
  if (move == &entry.read) return OnRead(entry);
  for (Target& target : entry.targets) {
    if (move == &target.move) return OnWritten(entry, target);
  }
}

void TierPass::OnWithdrawn(TierMove* move) {
  Entry& entry = EntryOf(move);
  if (move == &entry.read) --reading_;
  for (Target& target : entry.targets) {
    if (move != &target.move) continue;
    --writing_;
    target.state = Output::kReserved;
  }
  MakeReady(entry);
}

void TierPass::MakeReady(Entry& entry) {
  if (std::find(ready_.begin(), ready_.end(), &entry) == ready_.end()) ready_.push_back(&entry);
}

void TierPass::OnRead(Entry& entry) {
  --reading_;
  const absl::Status& status = entry.read.status;
  if (!status.ok() && !mover_.failed() && error_.ok() && ++entry.reads < kMaxReads) {
    ++counters_.retries;
    return StartRead(entry);
  }
  ready_.push_back(&entry);
  if (status.ok()) return;
  if (absl::IsDataLoss(status)) ++counters_.damaged_images;
  Fail(status);
}

void TierPass::OnWritten(Entry& entry, Target& target) {
  --writing_;
  const absl::Status& status = target.move.status;
  if (status.ok()) {
    ZS_FAULT_POINT("worker.tier.after_write");
    target.state = Output::kNone;
    const absl::Status completed = Complete(entry, target);
    ZS_FAULT_POINT("worker.tier.after_complete");
    FreeIfDone(entry);
    if (!completed.ok()) Fail(completed);
    return;
  }
  write_error_ = status;
  ++counters_.failed_slots;
  target.state = Output::kNoSlot;
  // A slot of a queue that failed may be written to later: its word stays for good.
  if (!mover_.failed()) store_.Failed(target.place.image.slot);
  if (mover_.failed()) Fail(status);
  if (error_.ok()) ++counters_.retries;
  MakeReady(entry);
}

void TierPass::FreeIfDone(Entry& entry) {
  for (const Target& target : entry.targets) {
    if (target.state != Output::kNone) return;
  }
  Free(entry);
}

void TierPass::Free(Entry& entry) {
  for (uint32_t i = 0; i < entry.buffer_count; ++i) free_buffers_.push_back(entry.buffers[i]);
  entry.buffer_count = 0;
  free_entries_.push_back(&entry);
}

void TierPass::Fail(const absl::Status& status) { KeepFirstError(error_, status); }

void TierPass::DropIdle() {
  for (Entry* entry : std::exchange(ready_, {})) {
    for (Target& target : entry->targets) {
      if (target.state == Output::kReserved) store_.Release(target.place.image.slot);
      if (target.state != Output::kWriting) target.state = Output::kNone;
    }
    FreeIfDone(*entry);
  }
}

}  // namespace zeroshard
