#include "storage/io_budget.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/strings.h"
#include "storage/io_budget_page.h"

namespace zeroshard {
namespace {

using Page = IoBudgetPage;
using Flow = IoBudgetPage::Flow;

absl::Status CheckLimits(std::string_view path, const IoLimits& limits) {
  if (path.empty() || path.size() >= PATH_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("a device of the I/O budget needs a path of 1 to ", PATH_MAX - 1,
                     " bytes, this one has ", path.size()));
  }
  if (limits.depth > IoBudget::kMaxDepth) {
    return absl::InvalidArgumentError(absl::StrCat(Abs(path), ": a depth of ", limits.depth,
                                                   " is more than ", IoBudget::kMaxDepth));
  }
  return absl::OkStatus();
}

void ForgetFlow(Flow& flow) {
  flow.waits.store(Page::kForNothing);
  flow.active_until.store(0);
}

uint32_t CountTokens(const Page::Device& device) {
  const auto taken = [](const auto& token) { return token.load() != 0; };
  return static_cast<uint32_t>(
      std::count_if(device.token, device.token + device.tokens.load(), taken));
}

}  // namespace

size_t IoBudget::Bytes() { return (sizeof(Page) + 4095) / 4096 * 4096; }

absl::StatusOr<IoBudget> IoBudget::Format(std::span<std::byte> memory, const Clock* clock) {
  if (memory.size() < Bytes() || reinterpret_cast<uintptr_t>(memory.data()) % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("an I/O budget needs ", Bytes(),
                                                   " bytes aligned to 64, found ", memory.size()));
  }
  // Zeroed memory is an empty page; only what is used is ever touched.
  auto* page = reinterpret_cast<Page*>(memory.data());
  page->version = Page::kVersion;
  page->magic = Page::kMagic;
  return IoBudget(page, clock);
}

absl::StatusOr<IoBudget> IoBudget::Adopt(std::span<std::byte> memory, const Clock* clock) {
  auto* page = reinterpret_cast<Page*>(memory.data());
  if (memory.size() < Bytes() || page->magic != Page::kMagic || page->version != Page::kVersion ||
      page->devices.load() > kMaxDevices || page->holders.load() > kMaxHolders) {
    return absl::DataLossError("the region is no I/O budget of this version");
  }
  return IoBudget(page, clock);
}

absl::StatusOr<uint32_t> IoBudget::AddDevice(std::string_view path, const IoLimits& limits) const {
  if (absl::Status status = CheckLimits(path, limits); !status.ok()) return status;
  const std::optional<uint32_t> known = FindDevice(path);
  const uint32_t number = known.value_or(page_->devices.load());
  if (number >= kMaxDevices) {
    return absl::ResourceExhaustedError(
        absl::StrCat(Abs(path), ": this daemon uses ", kMaxDevices, " paths already, its limit"));
  }
  Page::Device& device = page_->device[number];
  device.bytes_per_second.store(limits.bytes_per_second);
  device.tokens.store(std::max(device.tokens.load(), limits.depth));
  device.depth.store(limits.depth);
  device.write_budget.store(limits.write_budget);
  if (known) return number;
  std::memcpy(device.path, path.data(), path.size());
  device.path[path.size()] = 0;
  page_->devices.store(number + 1);
  return number;
}

uint32_t IoBudget::devices() const { return page_->devices.load(); }

std::string IoBudget::path(uint32_t device) const { return page_->device[device].path; }

std::optional<uint32_t> IoBudget::FindDevice(std::string_view path) const {
  for (uint32_t d = 0; d < devices(); ++d) {
    if (path == page_->device[d].path) return d;
  }
  return std::nullopt;
}

IoLimits IoBudget::limits(uint32_t device) const {
  const Page::Device& from = page_->device[device];
  return {.bytes_per_second = from.bytes_per_second.load(),
          .depth = from.depth.load(),
          .write_budget = from.write_budget.load()};
}

absl::StatusOr<uint32_t> IoBudget::AddHolder(std::string_view job, uint32_t worker) const {
  if (job.empty() || job.size() >= Page::kMaxJobName) {
    return absl::InvalidArgumentError(
        absl::StrCat("a job's name has 1 to ", Page::kMaxJobName - 1, " bytes, not ", job.size()));
  }
  uint32_t number = kMaxHolders;
  uint64_t job_number = 0;
  for (uint32_t h = kMaxHolders; h-- > 0;) {
    const Page::Holder& other = page_->holder[h];
    if (other.in_use.load() == 0) {
      number = h;
    } else if (job == other.name) {
      job_number = other.job.load();
    }
  }
  if (number == kMaxHolders) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this daemon runs ", kMaxHolders, " workers already, its limit"));
  }
  Page::Holder& holder = page_->holder[number];
  std::memcpy(holder.name, job.data(), job.size());
  holder.name[job.size()] = 0;
  holder.worker = worker;
  holder.job.store(job_number != 0 ? job_number : ++page_->last_job);
  holder.in_use.store(1);
  page_->holders.store(std::max(page_->holders.load(), number + 1));
  return number;
}

void IoBudget::Release(uint32_t holder) const {
  for (uint32_t d = 0; d < devices(); ++d) {
    Page::Device& device = page_->device[d];
    for (Flow& flow : device.slot[holder].flow) ForgetFlow(flow);
    for (uint32_t i = 0; i < device.tokens.load(); ++i) {
      auto mine = static_cast<uint16_t>(holder + 1);
      device.token[i].compare_exchange_strong(mine, 0);
    }
  }
}

void IoBudget::RemoveHolder(uint32_t holder) const {
  Release(holder);
  for (uint32_t d = 0; d < devices(); ++d) {
    Page::Slot& slot = page_->device[d].slot[holder];
    slot.finish.store(0);
    for (std::atomic<uint64_t>& bytes : slot.bytes) bytes.store(0);
  }
  page_->holder[holder].in_use.store(0);
}

int64_t IoBudget::Today() const {
  constexpr int64_t seconds_a_day = 86400;
  return std::max<int64_t>(0, absl::ToUnixSeconds(clock_->Now()) / seconds_a_day);
}

IoDay IoBudget::today(uint32_t device) const {
  return AddToDay(UnpackDay(page_->device[device].today.load()), Today(), 0);
}

void IoBudget::AddEarlier(uint32_t device, const IoDay& earlier) const {
  const int64_t day = Today();
  if (earlier.day != day) return;
  std::atomic<uint64_t>& word = page_->device[device].today;
  uint64_t before = word.load();
  while (!word.compare_exchange_weak(before,
                                     PackDay(AddToDay(UnpackDay(before), day, earlier.written)))) {
  }
}

IoBudget::Usage IoBudget::usage(uint32_t device) const {
  const Page::Device& from = page_->device[device];
  Usage usage;
  for (int i = 0; i < 2; ++i) usage.bytes[i] = from.bytes[i].load();
  usage.wait_seconds = static_cast<double>(from.wait_nanos.load()) * 1e-9;
  usage.overdrafts = from.overdrafts.load();
  usage.in_flight = CountTokens(from);
  const int64_t now = NowNanos();
  for (uint32_t h = 0; h < page_->holders.load(); ++h) {
    for (const Flow& flow : from.slot[h].flow) {
      const bool here = flow.active_until.load() >= now;
      usage.waiting += here && flow.waits.load() != Page::kForNothing;
    }
  }
  usage.written_today = today(device).written;
  const uint64_t budget = from.write_budget.load();
  if (budget > 0) {
    usage.budget_ratio = static_cast<double>(usage.written_today) / static_cast<double>(budget);
  }
  return usage;
}

std::vector<IoBudget::JobBytes> IoBudget::job_bytes() const {
  std::map<std::pair<std::string, uint32_t>, JobBytes> sums;
  for (uint32_t h = 0; h < page_->holders.load(); ++h) {
    const Page::Holder& holder = page_->holder[h];
    if (holder.in_use.load() == 0) continue;
    for (uint32_t d = 0; d < devices(); ++d) {
      const Page::Slot& slot = page_->device[d].slot[h];
      const uint64_t bytes[2] = {slot.bytes[0].load(), slot.bytes[1].load()};
      if (bytes[0] + bytes[1] == 0) continue;
      JobBytes& sum = sums[{holder.name, d}];
      sum.job = holder.name;
      sum.device = d;
      for (int i = 0; i < 2; ++i) sum.bytes[i] += bytes[i];
    }
  }
  std::vector<JobBytes> all;
  for (auto& [key, sum] : sums) all.push_back(std::move(sum));
  return all;
}

std::optional<IoWarning> IoBudget::TakeWarning(uint32_t device) const {
  const double ratio = usage(device).budget_ratio;
  const uint64_t level = ratio >= 1 ? 2 : ratio >= kNearBudget ? 1 : 0;
  const auto day = static_cast<uint64_t>(today(device).day);
  std::atomic<uint64_t>& warned = page_->device[device].warned;
  const uint64_t before = warned.load();
  const uint64_t warned_level = before >> 2 == day ? before & 3 : 0;
  if (level <= warned_level) return std::nullopt;
  warned.store(day << 2 | level);
  return level == 2 ? IoWarning::kWritesSlowed : IoWarning::kWritesNearBudget;
}

}  // namespace zeroshard
