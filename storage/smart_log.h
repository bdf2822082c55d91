// What an NVMe drive says of its own health: the SMART / Health Information log page. Pure.
//
// Source: NVM Express Base Specification, log page 02h.
#ifndef ZEROSHARD_STORAGE_SMART_LOG_H_
#define ZEROSHARD_STORAGE_SMART_LOG_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/statusor.h"

namespace zeroshard {

inline constexpr size_t kSmartLogBytes = 512;

// Counts of 128 bits are cut off at the largest of 64.
struct SmartLog {
  // Bits: 0 spare below its threshold, 1 temperature, 2 reliability degraded, 3 read-only, 4 backup
  // of volatile memory failed, 5 persistent memory region.
  uint8_t critical_warning = 0;
  std::optional<double> temperature_celsius;  // none where the drive reports 0 kelvin
  uint8_t available_spare_percent = 0;
  uint8_t spare_threshold_percent = 0;
  uint8_t used_percent = 0;  // of the estimated life; may exceed 100, 255 is the largest
  // In bytes: the drive counts units of 512,000 bytes, rounded up.
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t power_on_hours = 0;
  uint64_t unsafe_shutdowns = 0;
  uint64_t media_errors = 0;  // data that could not be read back whole
  friend bool operator==(const SmartLog&, const SmartLog&) = default;
};

// InvalidArgument for less than kSmartLogBytes, or a page of zeros, which no drive sends.
absl::StatusOr<SmartLog> ParseSmartLog(std::span<const std::byte> page);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_SMART_LOG_H_
