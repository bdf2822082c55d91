#include "storage/device_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x314254564544535aULL;  // "ZSDEVTB1"
constexpr uint32_t kVersion = 1;
constexpr uint64_t kLine = 64;
constexpr uint32_t kSlotBits = 24;
constexpr uint64_t kSlotMask = (uint64_t{1} << kSlotBits) - 1;

absl::Status Damaged(const std::string& what, uint64_t found, uint64_t expected) {
  return absl::DataLossError(
      absl::StrCat("device table: ", what, " is ", found, ", expected ", expected));
}

}  // namespace

DeviceTable::DeviceTable(std::span<std::byte> memory, const DevicePlan& plan)
    : plan_(&plan),
      header_(reinterpret_cast<Header*>(memory.data())),
      words_(reinterpret_cast<std::atomic<uint64_t>*>(memory.data() + sizeof(Header))),
      targets_(words_ + plan.images().size()),
      used_(plan.slots(), false) {}

absl::StatusOr<DeviceTable> DeviceTable::Open(std::span<std::byte> memory, const DevicePlan& plan,
                                              uint64_t job_id, uint64_t layout_fingerprint) {
  if (memory.size() < plan.table_bytes() ||
      reinterpret_cast<uintptr_t>(memory.data()) % kLine != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a device table of ", memory.size(),
                                                   " bytes, need ", plan.table_bytes(),
                                                   " aligned to 64"));
  }
  if (plan.slots() >= kSlotMask) {
    return absl::InvalidArgumentError(absl::StrCat(plan.slots(), " slots of device memory"));
  }
  DeviceTable table(memory, plan);
  if (table.header_->formatted.load(std::memory_order_acquire) == 0) {
    table.Format(job_id, layout_fingerprint);
    return table;
  }
  ZS_RETURN_IF_ERROR(table.Check(job_id, layout_fingerprint));
  ZS_RETURN_IF_ERROR(table.Adopt());
  return table;
}

void DeviceTable::Format(uint64_t job_id, uint64_t layout_fingerprint) {
  header_->magic = kMagic;
  header_->version = kVersion;
  header_->images = static_cast<uint32_t>(plan_->images().size());
  header_->slots = plan_->slots();
  header_->job_id = job_id;
  header_->layout_fingerprint = layout_fingerprint;
  header_->plan_fingerprint = plan_->fingerprint();
  header_->formatted.store(1, std::memory_order_release);
}

absl::Status DeviceTable::Check(uint64_t job_id, uint64_t layout_fingerprint) {
  const struct {
    const char* what;
    uint64_t found, expected;
  } fields[] = {{"magic", header_->magic, kMagic},
                {"version", header_->version, kVersion},
                {"images", header_->images, plan_->images().size()},
                {"slots", header_->slots, plan_->slots()},
                {"job id", header_->job_id, job_id},
                {"layout fingerprint", header_->layout_fingerprint, layout_fingerprint},
                {"plan fingerprint", header_->plan_fingerprint, plan_->fingerprint()}};
  for (const auto& field : fields) {
    if (field.found != field.expected) return Damaged(field.what, field.found, field.expected);
  }
  return absl::OkStatus();
}

absl::Status DeviceTable::Adopt() {
  for (uint32_t image = 0; image < plan_->images().size(); ++image) {
    const std::optional<Place> named = place(image);
    if (!named.has_value()) continue;
    if (named->slot >= plan_->slots() || !Fits(image, named->slot)) {
      return Damaged(absl::StrCat("slot of image ", image), named->slot, plan_->slots());
    }
    if (used_[named->slot]) {
      return absl::DataLossError(
          absl::StrCat("device table: two images are in slot ", named->slot));
    }
    used_[named->slot] = true;
  }
  return absl::OkStatus();
}

bool DeviceTable::Fits(uint32_t image, uint32_t slot) const {
  return plan_->images()[image].elements > 0 &&
         plan_->class_of_slot(slot).bytes >= plan_->image_bytes(image);
}

std::optional<DeviceTable::Place> DeviceTable::place(uint32_t image) const {
  const uint64_t value = word(image).load(std::memory_order_acquire);
  if (value == 0) return std::nullopt;
  return Place{.slot = static_cast<uint32_t>(value & kSlotMask) - 1, .attempt = value >> kSlotBits};
}

std::optional<uint32_t> DeviceTable::Reserve(uint32_t image, Purpose purpose) {
  const DeviceImage& planned = plan_->images()[image];
  if (planned.elements == 0) return std::nullopt;
  // Classes get smaller: from its own to the larger ones.
  for (uint32_t i = planned.slot_class + 1; i-- > 0;) {
    const DeviceSlotClass& slots = plan_->classes()[i];
    const auto begin = used_.begin() + slots.first;
    const auto end = begin + slots.slots;
    const auto free = std::find(begin, end, false);
    if (free == end) continue;
    if (purpose == Purpose::kMove && std::find(free + 1, end, false) == end) continue;
    *free = true;
    return static_cast<uint32_t>(free - used_.begin());
  }
  return std::nullopt;
}

void DeviceTable::Name(uint32_t image, uint32_t slot, uint64_t attempt) {
  const std::optional<Place> before = place(image);
  Store(word(image), attempt << kSlotBits | (slot + 1));
  used_[slot] = true;
  if (before.has_value() && before->slot != slot) used_[before->slot] = false;
}

void DeviceTable::Forget(uint32_t image) {
  const std::optional<Place> before = place(image);
  if (!before.has_value()) return;
  Store(word(image), 0);
  used_[before->slot] = false;
}

DeviceTarget DeviceTable::target(uint32_t image) const {
  const uint64_t value = targets_[image].load(std::memory_order_acquire);
  return value <= static_cast<uint64_t>(DeviceTarget::kGpu) ? static_cast<DeviceTarget>(value)
                                                            : DeviceTarget::kAsPlanned;
}

void DeviceTable::SetTarget(uint32_t image, DeviceTarget target) {
  Store(targets_[image], static_cast<uint64_t>(target));
}

uint32_t DeviceTable::free_slots() const {
  return static_cast<uint32_t>(std::count(used_.begin(), used_.end(), false));
}

void DeviceTable::Store(std::atomic<uint64_t>& word, uint64_t value) const {
  word.store(value, std::memory_order_release);
  if (observer_) observer_();
}

}  // namespace zeroshard
