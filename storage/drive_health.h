// Which drives lie behind a path, and what they say of their health.
//
// From /sys, and for NVMe drives from their SMART log, which needs the right to send admin commands
// (root, or CAP_SYS_ADMIN and access to /dev/nvmeN). Nothing here is necessary for the tier:
// whatever cannot be read is absent, with the reason. Any thread; a call may take as long as a
// drive takes to answer, at most some seconds each.
#ifndef ZEROSHARD_STORAGE_DRIVE_HEALTH_H_
#define ZEROSHARD_STORAGE_DRIVE_HEALTH_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/smart_log.h"

namespace zeroshard {

// Where things are read from; other than the defaults in tests.
struct DriveSources {
  std::string root;  // before /sys, /proc and /dev
  // The bytes of the SMART log of an NVMe controller by its device node.
  std::function<absl::StatusOr<std::vector<std::byte>>(const std::string& device)> smart_log;
};
DriveSources SystemDriveSources();

// The names of the whole drives behind a path ("nvme0n1"), through partitions, device mapper and
// RAID, sorted. NotFound when no block device is behind it (memory, network, overlay).
absl::StatusOr<std::vector<std::string>> DrivesBehind(const std::string& path,
                                                      const DriveSources& sources);
// The same by the number of a block device.
absl::StatusOr<std::vector<std::string>> DrivesOfDevice(dev_t device, const DriveSources& sources);

struct DriveHealth {
  std::string name;   // "nvme0n1"
  std::string model;  // empty where it has none
  uint64_t bytes = 0;
  bool rotational = false;
  std::optional<double> temperature_celsius;
  std::optional<double> used_percent;     // of its life by the maker's estimate; may exceed 100
  std::optional<uint64_t> media_errors;   // over its life
  std::optional<uint64_t> written_bytes;  // over its life
  uint8_t critical_warning = 0;           // of the SMART log, 0 for none
  std::vector<std::string> missing;       // why values are absent, each reason once
};

DriveHealth ReadDriveHealth(const std::string& name, const DriveSources& sources);

// "nvme0n1 (ACME 1000, 1.8 TB), 41 C, 3 % used, 0 media errors": what is known, for messages.
std::string DescribeDrive(const DriveHealth& drive);

// "spare is low, read-only" for the bits of SmartLog::critical_warning.
std::string DescribeCriticalWarning(uint8_t bits);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_DRIVE_HEALTH_H_
