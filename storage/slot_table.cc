#include "storage/slot_table.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x3153544f4c53535aULL;  // "ZSSLOTS1"
constexpr uint32_t kVersion = 1;
constexpr uint64_t kLine = 64;
// The upper half of a slot's word.
constexpr uint64_t kMaxGeneration = (uint64_t{1} << 31) - 1;

uint64_t SlotWord(uint64_t generation, uint32_t chunk) { return generation << 32 | (chunk + 1); }

// Generations are compared as they stand in the words.
uint64_t GenerationOf(uint64_t word) { return word >> 32; }

absl::Status CheckMemory(std::span<std::byte> memory, const SlotTableShape& shape) {
  const uint64_t need = SlotTable::Bytes(shape.chunks, shape.slots);
  if (memory.size() < need || reinterpret_cast<uintptr_t>(memory.data()) % kLine != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a slot table of ", memory.size(), " bytes, need ", need, " aligned to 64"));
  }
  if (shape.chunks == 0 || shape.slots < uint64_t{2} * shape.chunks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a slot table of ", shape.chunks, " chunks and ", shape.slots, " slots"));
  }
  return absl::OkStatus();
}

absl::Status Damaged(std::string_view what, uint64_t found, uint64_t expected) {
  return absl::DataLossError(
      absl::StrCat("slot table: ", Abs(what), " is ", found, ", expected ", expected));
}

}  // namespace

uint64_t SlotTable::Bytes(uint32_t chunks, uint32_t slots) {
  const uint64_t words = (uint64_t{slots} * sizeof(uint64_t) + kLine - 1) / kLine * kLine;
  return sizeof(Header) + uint64_t{2} * chunks * sizeof(Entry) + words;
}

SlotTable::SlotTable(std::span<std::byte> memory, uint32_t chunks)
    : header_(reinterpret_cast<Header*>(memory.data())),
      entries_(reinterpret_cast<Entry*>(memory.data() + sizeof(Header))),
      words_(reinterpret_cast<std::atomic<uint64_t>*>(entries_ + size_t{2} * chunks)) {}

absl::StatusOr<SlotTable> SlotTable::Format(std::span<std::byte> memory,
                                            const SlotTableShape& shape, uint64_t generation,
                                            uint64_t committed) {
  ZS_RETURN_IF_ERROR(CheckMemory(memory, shape));
  if (generation == 0 || generation > kMaxGeneration) {
    return absl::InvalidArgumentError(absl::StrCat("generation ", generation));
  }
  std::memset(memory.data(), 0, Bytes(shape.chunks, shape.slots));
  SlotTable table(memory, shape.chunks);
  Header& header = *table.header_;
  header.version = kVersion;
  header.chunks = shape.chunks;
  header.slots = shape.slots;
  header.job_id = shape.job_id;
  header.layout_fingerprint = shape.layout_fingerprint;
  header.plan_fingerprint = shape.plan_fingerprint;
  header.generation.store(generation, std::memory_order_relaxed);
  header.committed.store(committed + 1, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  header.magic = kMagic;
  table.named_.assign(shape.slots, false);
  return table;
}

absl::StatusOr<SlotTable> SlotTable::Adopt(std::span<std::byte> memory,
                                           const SlotTableShape& shape) {
  ZS_RETURN_IF_ERROR(CheckMemory(memory, shape));
  SlotTable table(memory, shape.chunks);
  const Header& header = *table.header_;
  const struct {
    const char* what;
    uint64_t found, expected;
  } fields[] = {{"magic", header.magic, kMagic},
                {"version", header.version, kVersion},
                {"chunks", header.chunks, shape.chunks},
                {"slots", header.slots, shape.slots},
                {"job id", header.job_id, shape.job_id},
                {"layout fingerprint", header.layout_fingerprint, shape.layout_fingerprint},
                {"plan fingerprint", header.plan_fingerprint, shape.plan_fingerprint}};
  for (const auto& field : fields) {
    if (field.found != field.expected) return Damaged(field.what, field.found, field.expected);
  }
  if (table.generation() == 0 || table.generation() >= kMaxGeneration) {
    return Damaged("generation", table.generation(), 1);
  }
  if (const uint64_t tag = header.committed.load(); tag == 0 || tag >> 62 != 0) {
    return Damaged("committed tag", tag, 1);
  }
  table.named_.assign(shape.slots, false);
  ZS_RETURN_IF_ERROR(table.CheckEntries());
  table.Store(table.header_->generation, table.generation() + 1);
  // What is named was written whole; its writer died before it could say so.
  for (uint32_t slot = 0; slot < shape.slots; ++slot) {
    if (table.named_[slot] && table.words_[slot].load() != 0) table.Store(table.words_[slot], 0);
  }
  return table;
}

absl::Status SlotTable::CheckEntries() {
  for (uint32_t chunk = 0; chunk < chunks(); ++chunk) {
    for (int i = 0; i < 2; ++i) {
      const Entry& entry = entries(chunk)[i];
      if (entry.tag.load(std::memory_order_acquire) == 0) continue;
      const bool home = entry.slot / 2 == chunk;
      if (entry.slot >= header_->slots || (!home && entry.slot < 2 * chunks())) {
        return Damaged(Std(absl::StrCat("slot of chunk ", chunk)), entry.slot, 2 * chunk);
      }
      if (named_[entry.slot]) {
        return Damaged(Std(absl::StrCat("number of entries with slot ", entry.slot)), 2, 1);
      }
      named_[entry.slot] = true;
    }
  }
  return absl::OkStatus();
}

int SlotTable::CurrentIndex(uint32_t chunk) const {
  const uint64_t committed = header_->committed.load(std::memory_order_relaxed);
  int best = -1;
  for (int i = 0; i < 2; ++i) {
    const uint64_t tag = entries(chunk)[i].tag.load(std::memory_order_acquire);
    if (tag == 0 || tag > committed) continue;
    if (best < 0 || entries(chunk)[i].sequence > entries(chunk)[best].sequence) best = i;
  }
  return best;
}

int SlotTable::PreparedIndex(uint32_t chunk) const {
  if (open_ <= header_->committed.load(std::memory_order_relaxed)) return -1;
  for (int i = 0; i < 2; ++i) {
    if (entries(chunk)[i].tag.load(std::memory_order_acquire) == open_) return i;
  }
  return -1;
}

SlotImage SlotTable::ImageOf(const Entry& entry) const {
  return {entry.slot, entry.generation, entry.tag.load(std::memory_order_relaxed) - 1, entry.step,
          entry.checksum};
}

std::optional<SlotImage> SlotTable::Current(uint32_t chunk) const {
  const int index = CurrentIndex(chunk);
  if (index < 0) return std::nullopt;
  return ImageOf(entries(chunk)[index]);
}

std::optional<SlotImage> SlotTable::Prepared(uint32_t chunk) const {
  const int index = PreparedIndex(chunk);
  if (index < 0) return std::nullopt;
  return ImageOf(entries(chunk)[index]);
}

// A killed process has done all stores up to some point in program order and none after it; only
// the compiler must be held to that order.
void SlotTable::Store(std::atomic<uint64_t>& word, uint64_t value) const {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  word.store(value, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (observer_) observer_();
}

void SlotTable::Clear(Entry& entry) {
  named_[entry.slot] = false;
  Store(entry.tag, 0);
}

void SlotTable::Fill(Entry& entry, const SlotImage& image, uint64_t sequence) {
  entry.sequence = sequence;
  entry.slot = image.slot;
  entry.generation = image.generation;
  entry.step = image.step;
  entry.checksum = image.checksum;
  named_[image.slot] = true;
  Store(entry.tag, image.attempt + 1);
}

void SlotTable::ClearOthers(uint64_t tag) {
  const uint64_t committed = header_->committed.load(std::memory_order_relaxed);
  for (uint32_t chunk = 0; chunk < chunks(); ++chunk) {
    const int current = CurrentIndex(chunk);
    for (int i = 0; i < 2; ++i) {
      const uint64_t found = entries(chunk)[i].tag.load(std::memory_order_relaxed);
      const bool prepared = found == tag && tag > committed;
      if (found != 0 && i != current && !prepared) Clear(entries(chunk)[i]);
    }
  }
}

absl::Status SlotTable::Begin(uint64_t attempt) {
  if (attempt < committed()) {
    return absl::InvalidArgumentError(
        absl::StrCat("attempt ", attempt, " begins after ", committed(), " was committed"));
  }
  ClearOthers(attempt + 1);
  open_ = attempt + 1;
  return absl::OkStatus();
}

absl::Status SlotTable::Commit(uint64_t attempt) {
  if (attempt < committed()) {
    return absl::InvalidArgumentError(
        absl::StrCat("commit of attempt ", attempt, " after that of ", committed()));
  }
  if (attempt == committed()) return absl::OkStatus();
  // What dropped attempts before this one prepared would be taken for committed.
  ClearOthers(attempt + 1);
  Store(header_->committed, attempt + 1);
  return absl::OkStatus();
}

bool SlotTable::IsFree(uint32_t slot) const {
  return !named_[slot] && words_[slot].load(std::memory_order_acquire) == 0;
}

absl::StatusOr<uint32_t> SlotTable::Reserve(uint32_t chunk) {
  if (open_ == 0 || chunk >= chunks()) {
    return absl::FailedPreconditionError(
        absl::StrCat("a slot for chunk ", chunk, " of ", chunks(), " without an open attempt"));
  }
  if (PreparedIndex(chunk) >= 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", chunk, " is complete in attempt ", open_ - 1));
  }
  const int current = CurrentIndex(chunk);
  for (int i = 0; i < 2; ++i) {
    if (i != current && entries(chunk)[i].tag.load() != 0) Clear(entries(chunk)[i]);
  }
  uint32_t slot = 2 * chunk;
  if (!IsFree(slot)) ++slot;
  if (!IsFree(slot)) {
    for (slot = 2 * chunks(); slot < header_->slots && !IsFree(slot);) ++slot;
  }
  if (slot == header_->slots) {
    return absl::UnavailableError(absl::StrCat(
        "chunk ", chunk, " has no slot: ", quarantined(),
        " slots may still be written by a dead worker, and no spare one is left; drain the files"));
  }
  Store(words_[slot], SlotWord(generation(), chunk));
  return slot;
}

absl::Status SlotTable::Complete(uint32_t chunk, const SlotImage& image) {
  ZS_CHECK(image.generation == generation() &&
               words_[image.slot].load() == SlotWord(generation(), chunk),
           "the slot was not reserved for the chunk");
  if (image.attempt + 1 != open_ || PreparedIndex(chunk) >= 0) {
    Store(words_[image.slot], 0);
    return absl::FailedPreconditionError(absl::StrCat("chunk ", chunk, " was written for attempt ",
                                                      image.attempt,
                                                      ", which is complete or not the open one"));
  }
  const int current = CurrentIndex(chunk);
  Entry& entry = entries(chunk)[current == 0 ? 1 : 0];
  if (entry.tag.load() != 0) Clear(entry);
  Fill(entry, image, current < 0 ? 1 : entries(chunk)[current].sequence + 1);
  Store(words_[image.slot], 0);
  return absl::OkStatus();
}

void SlotTable::Release(uint32_t slot) {
  ZS_CHECK(GenerationOf(words_[slot].load()) == generation(), "slot is not in flight here");
  Store(words_[slot], 0);
}

void SlotTable::Forget(uint32_t chunk) {
  // The other entry first: without the current one it might be taken for it.
  const int current = CurrentIndex(chunk);
  for (int i = 0; i < 2; ++i) {
    if (i != current && entries(chunk)[i].tag.load() != 0) Clear(entries(chunk)[i]);
  }
  if (current >= 0) Clear(entries(chunk)[current]);
}

absl::Status SlotTable::Restore(uint32_t chunk, const SlotImage& image) {
  const bool home = image.slot / 2 == chunk;
  if (chunk >= chunks() || image.slot >= header_->slots || (!home && image.slot < 2 * chunks()) ||
      named_[image.slot] || image.attempt > committed() || CurrentIndex(chunk) >= 0) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", image.slot, " with attempt ",
                                                   image.attempt, " cannot be the image of chunk ",
                                                   chunk));
  }
  Fill(entries(chunk)[0], image, 1);
  return absl::OkStatus();
}

uint32_t SlotTable::quarantined() const {
  uint32_t count = 0;
  for (uint32_t slot = 0; slot < header_->slots; ++slot) {
    const uint64_t word = words_[slot].load(std::memory_order_relaxed);
    count += word != 0 && GenerationOf(word) < generation() ? 1 : 0;
  }
  return count;
}

uint32_t SlotTable::free_spares() const {
  uint32_t count = 0;
  for (uint32_t slot = 2 * chunks(); slot < header_->slots; ++slot) count += IsFree(slot) ? 1 : 0;
  return count;
}

uint32_t SlotTable::ReleaseDrained() {
  uint32_t count = 0;
  for (uint32_t slot = 0; slot < header_->slots; ++slot) {
    const uint64_t word = words_[slot].load(std::memory_order_relaxed);
    if (word == 0 || GenerationOf(word) >= generation()) continue;
    Store(words_[slot], 0);
    ++count;
  }
  return count;
}

}  // namespace zeroshard
