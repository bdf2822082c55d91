#include "storage/smart_log.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

// Offsets in the page; numbers are little-endian.
constexpr size_t kCriticalWarning = 0;
constexpr size_t kTemperature = 1;
constexpr size_t kAvailableSpare = 3;
constexpr size_t kSpareThreshold = 4;
constexpr size_t kUsed = 5;
constexpr size_t kUnitsRead = 32;
constexpr size_t kUnitsWritten = 48;
constexpr size_t kPowerOnHours = 128;
constexpr size_t kUnsafeShutdowns = 144;
constexpr size_t kMediaErrors = 160;

constexpr uint64_t kUnitBytes = 512'000;
constexpr double kZeroCelsius = 273;  // in whole kelvins, as drives and tools have it

uint8_t Byte(std::span<const std::byte> page, size_t at) {
  return std::to_integer<uint8_t>(page[at]);
}

uint64_t Count128(std::span<const std::byte> page, size_t at) {
  uint64_t low = 0;
  uint64_t high = 0;
  for (size_t i = 0; i < 8; ++i) {
    low |= uint64_t{Byte(page, at + i)} << 8 * i;
    high |= uint64_t{Byte(page, at + 8 + i)} << 8 * i;
  }
  return high == 0 ? low : std::numeric_limits<uint64_t>::max();
}

uint64_t UnitsToBytes(uint64_t units) {
  constexpr uint64_t most = std::numeric_limits<uint64_t>::max();
  return units > most / kUnitBytes ? most : units * kUnitBytes;
}

}  // namespace

absl::StatusOr<SmartLog> ParseSmartLog(std::span<const std::byte> page) {
  if (page.size() < kSmartLogBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a SMART log has ", kSmartLogBytes, " bytes, found ", page.size()));
  }
  page = page.first(kSmartLogBytes);
  if (std::all_of(page.begin(), page.end(), [](std::byte b) { return b == std::byte{0}; })) {
    return absl::InvalidArgumentError("the SMART log is all zeros");
  }
  SmartLog log;
  log.critical_warning = Byte(page, kCriticalWarning);
  const int kelvin = Byte(page, kTemperature) | Byte(page, kTemperature + 1) << 8;
  if (kelvin != 0) log.temperature_celsius = kelvin - kZeroCelsius;
  log.available_spare_percent = Byte(page, kAvailableSpare);
  log.spare_threshold_percent = Byte(page, kSpareThreshold);
  log.used_percent = Byte(page, kUsed);
  log.read_bytes = UnitsToBytes(Count128(page, kUnitsRead));
  log.written_bytes = UnitsToBytes(Count128(page, kUnitsWritten));
  log.power_on_hours = Count128(page, kPowerOnHours);
  log.unsafe_shutdowns = Count128(page, kUnsafeShutdowns);
  log.media_errors = Count128(page, kMediaErrors);
  return log;
}

}  // namespace zeroshard
