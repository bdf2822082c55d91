#include "storage/device_mirror.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "storage/bytes.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x31524d564544535aULL;  // "ZSDEVMR1"
constexpr uint32_t kVersion = 2;
constexpr uint64_t kPage = 4096;
// Of a record: numbers of fixed size; an update count; what goes around a user_state.
constexpr uint64_t kFixedNumbers = 1024;
constexpr uint64_t kCountBytes = 10;
constexpr uint64_t kUserStateFrame = 16;

uint64_t NumbersCapacity(const Layout& layout, const model::v1::EngineConfig& config) {
  return RoundUpTo(kFixedNumbers + layout.parameters().size() * kCountBytes +
                       config.world_size() * (config.user_state_bytes() + kUserStateFrame),
                   kPage);
}

}  // namespace

MirrorPlan MirrorPlan::Create(const Layout& layout, const PartitionPlan& partition,
                              const DevicePlan& device, const model::v1::EngineConfig& config) {
  MirrorPlan plan;
  plan.numbers_capacity_ = NumbersCapacity(layout, config);
  const auto add = [&plan](const MirrorPart& part) {
    if (part.bytes > 0) plan.parts_.push_back(part);
  };
  // Offsets follow once it is known how many checksums there are.
  for (uint32_t image = 0; image < device.images().size(); ++image) {
    add({.bytes = device.image_bytes(image), .unit = device.images()[image].unit, .image = image});
  }
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    const uint64_t bytes =
        partition.unit(unit).shard.elements() * SizeOf(layout.units()[unit].dtype);
    for (uint64_t done = 0; done < bytes; done += kMirrorPieceBytes) {
      add({.offset = done, .bytes = std::min(kMirrorPieceBytes, bytes - done), .unit = unit});
    }
  }
  plan.checksums_ = plan.numbers() + plan.numbers_capacity_;
  uint64_t at =
      RoundUpTo(plan.checksums_ + plan.parts_.size() * sizeof(uint64_t), kDeviceAlignment);
  const auto take = [&at](uint64_t bytes) {
    const uint64_t offset = at;
    at = RoundUpTo(at + bytes, kDeviceAlignment);
    return offset;
  };
  for (uint32_t image = 0; image < device.images().size(); ++image) {
    plan.images_.push_back(take(device.image_bytes(image)));
  }
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    plan.parameters_.push_back(
        take(partition.unit(unit).shard.elements() * SizeOf(layout.units()[unit].dtype)));
  }
  for (MirrorPart& part : plan.parts_) {
    part.offset +=
        part.image != MirrorPart::kNone ? plan.images_[part.image] : plan.parameters_[part.unit];
  }
  plan.half_bytes_ = RoundUpTo(at, kPage);
  return plan;
}

uint64_t MirrorPlan::numbers() const { return kPage; }

absl::StatusOr<DeviceMirror> DeviceMirror::Open(std::span<std::byte> memory, const MirrorPlan& plan,
                                                const Identity& identity) {
  if (memory.size() < plan.bytes() || reinterpret_cast<uintptr_t>(memory.data()) % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a device mirror of ", memory.size(), " bytes, need ", plan.bytes(), " aligned to 64"));
  }
  return DeviceMirror(memory, plan, identity);
}

bool DeviceMirror::IsWhole(uint32_t h) const {
  const Header& found = header(h);
  return found.complete.load(std::memory_order_acquire) == 1 && found.magic == kMagic &&
         found.version == kVersion && found.worker == identity_.worker &&
         found.job_id == identity_.job_id &&
         found.layout_fingerprint == identity_.layout_fingerprint &&
         found.plan_fingerprint == identity_.plan_fingerprint &&
         found.numbers_bytes <= plan_->numbers_capacity();
}

std::optional<MirrorPoint> DeviceMirror::Newest() const {
  std::optional<MirrorPoint> newest;
  for (uint32_t h = 0; h < 2; ++h) {
    if (!IsWhole(h)) continue;
    const MirrorPoint point = {header(h).attempt, header(h).step};
    if (!newest.has_value() || point.attempt > newest->attempt) newest = point;
  }
  return newest;
}

std::optional<uint32_t> DeviceMirror::Find(uint64_t attempt) const {
  for (uint32_t h = 0; h < 2; ++h) {
    if (IsWhole(h) && header(h).attempt == attempt) return h;
  }
  return std::nullopt;
}

std::string_view DeviceMirror::numbers(uint32_t h) const {
  return {reinterpret_cast<const char*>(half(h) + plan_->numbers()), header(h).numbers_bytes};
}

uint32_t DeviceMirror::Begin() {
  uint32_t next = 0;
  if (IsWhole(0) && (!IsWhole(1) || header(0).attempt > header(1).attempt)) next = 1;
  header(next).complete.store(0, std::memory_order_release);
  return next;
}

absl::Status DeviceMirror::Finish(uint32_t h, const MirrorPoint& point, std::string_view numbers) {
  if (numbers.size() > plan_->numbers_capacity()) {
    return absl::ResourceExhaustedError(absl::StrCat("the job's numbers take ", numbers.size(),
                                                     " bytes, the mirror has room for ",
                                                     plan_->numbers_capacity()));
  }
  std::memcpy(half(h) + plan_->numbers(), numbers.data(), numbers.size());
  Header& out = header(h);
  out.magic = kMagic;
  out.version = kVersion;
  out.worker = identity_.worker;
  out.job_id = identity_.job_id;
  out.layout_fingerprint = identity_.layout_fingerprint;
  out.plan_fingerprint = identity_.plan_fingerprint;
  out.step = point.step;
  out.attempt = point.attempt;
  out.numbers_bytes = numbers.size();
  out.checksum = HeaderSum(h);
  out.complete.store(1, std::memory_order_release);
  return absl::OkStatus();
}

void DeviceMirror::Sum(uint32_t h, size_t part) const {
  const MirrorPart& where = plan_->parts()[part];
  checksum(h, part) = Xxh3_64(half(h) + where.offset, where.bytes);
}

bool DeviceMirror::IsIntact(uint32_t h, size_t part) const {
  const MirrorPart& where = plan_->parts()[part];
  return checksum(h, part) == Xxh3_64(half(h) + where.offset, where.bytes);
}

uint64_t DeviceMirror::HeaderSum(uint32_t h) const {
  const uint64_t sums[3] = {
      Xxh3_64(half(h), offsetof(Header, checksum)), Xxh3_64(numbers(h)),
      Xxh3_64(half(h) + plan_->checksums(), plan_->parts().size() * sizeof(uint64_t))};
  return Xxh3_64(sums, sizeof(sums));
}

absl::Status DeviceMirror::CheckHeader(uint32_t h) const {
  if (header(h).checksum == HeaderSum(h)) return absl::OkStatus();
  return absl::DataLossError("its header, numbers or checksums are not what was written");
}

void DeviceMirror::ForgetAfter(uint64_t attempt) {
  for (uint32_t h = 0; h < 2; ++h) {
    if (header(h).attempt > attempt) header(h).complete.store(0, std::memory_order_release);
  }
}

void DeviceMirror::ForgetBefore(uint64_t attempt) {
  for (uint32_t h = 0; h < 2; ++h) {
    if (header(h).attempt < attempt) header(h).complete.store(0, std::memory_order_release);
  }
}

std::vector<MirrorPoint> DeviceMirror::PointsIn(std::span<const std::byte> memory,
                                                uint64_t job_id) {
  std::vector<MirrorPoint> points;
  for (const size_t offset : {size_t{0}, memory.size() / 2}) {
    const auto& header = *reinterpret_cast<const Header*>(memory.data() + offset);
    if (header.complete.load(std::memory_order_acquire) != 1 || header.magic != kMagic ||
        header.version != kVersion || header.job_id != job_id) {
      continue;
    }
    points.push_back({header.attempt, header.step});
  }
  return points;
}

std::vector<MirrorPoint> CommonPoints(std::span<const std::vector<MirrorPoint>> points) {
  std::vector<MirrorPoint> common;
  if (points.empty()) return common;
  for (const MirrorPoint& point : points.front()) {
    const bool everywhere =
        std::all_of(points.begin(), points.end(), [&](const std::vector<MirrorPoint>& of_worker) {
          return std::find(of_worker.begin(), of_worker.end(), point) != of_worker.end();
        });
    if (everywhere) common.push_back(point);
  }
  return common;
}

std::optional<MirrorPoint> NewestOf(std::span<const MirrorPoint> points) {
  const auto newest = std::max_element(
      points.begin(), points.end(),
      [](const MirrorPoint& a, const MirrorPoint& b) { return a.attempt < b.attempt; });
  if (newest == points.end()) return std::nullopt;
  return *newest;
}

}  // namespace zeroshard
