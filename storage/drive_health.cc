#include "storage/drive_health.h"

#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxLevels = 8;  // of devices on devices
constexpr uint64_t kSectorBytes = 512;

// The text of a file of /sys without white space around it; nothing when it cannot be read.
std::optional<std::string> ReadText(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file.good() || !(text << file.rdbuf())) return std::nullopt;
  std::string trimmed = text.str();
  absl::StripAsciiWhitespace(&trimmed);
  return trimmed;
}

std::optional<int64_t> ReadNumber(const fs::path& path) {
  const std::optional<std::string> text = ReadText(path);
  int64_t number = 0;
  if (!text || !absl::SimpleAtoi(*text, &number)) return std::nullopt;
  return number;
}

// The names in a directory whose name begins with `prefix` and goes on with digits only, or any
// when it is empty; sorted.
std::vector<fs::path> List(const fs::path& directory, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    const bool fits =
        prefix.empty() || (name.starts_with(prefix) && name.size() > prefix.size() &&
                           std::all_of(name.begin() + static_cast<ptrdiff_t>(prefix.size()),
                                       name.end(), [](char c) { return absl::ascii_isdigit(c); }));
    if (fits) found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Adds the whole drives below the block device of a directory of /sys.
void CollectDrives(fs::path directory, int level, std::set<std::string>& drives) {
  std::error_code error;
  directory = fs::canonical(directory, error);
  if (error || level > kMaxLevels) return;
  if (fs::exists(directory / "partition", error)) directory = directory.parent_path();
  const std::vector<fs::path> slaves = List(directory / "slaves", "");
  for (const fs::path& slave : slaves) CollectDrives(slave, level + 1, drives);
  if (slaves.empty()) drives.insert(directory.filename());
}

absl::StatusOr<std::vector<std::string>> DrivesBelow(const fs::path& directory) {
  std::set<std::string> drives;
  CollectDrives(directory, 0, drives);
  if (drives.empty()) {
    return absl::NotFoundError(absl::StrCat("there is no ", directory.string()));
  }
  return std::vector<std::string>(drives.begin(), drives.end());
}

// The device that a file system with a number of its own (btrfs) is mounted from.
std::optional<std::string> MountSource(dev_t device, const DriveSources& sources) {
  std::ifstream mounts(sources.root + "/proc/self/mountinfo");
  const std::string number = absl::StrCat(major(device), ":", minor(device));
  std::string line;
  while (std::getline(mounts, line)) {
    // id parent major:minor root point options [tags] - type source options
    std::istringstream words(line);
    std::string word;
    std::string source;
    std::string its_number;
    words >> word >> word >> its_number;
    while (words >> word && word != "-") {
    }
    words >> word >> source;
    if (its_number == number && source.starts_with("/dev/")) return source;
  }
  return std::nullopt;
}

// The controllers of an NVMe drive: one, or the paths of a drive that has several.
std::vector<fs::path> ControllersOf(const fs::path& drive) {
  std::error_code error;
  const fs::path device = fs::canonical(drive / "device", error);
  if (error) return {};
  const bool several = device.filename().string().starts_with("nvme-subsys");
  return several ? List(device, "nvme") : std::vector<fs::path>{device};
}

std::optional<double> SensorTemperature(const std::vector<fs::path>& devices) {
  for (const fs::path& device : devices) {
    for (const fs::path& place : {device, device / "hwmon", device / "device" / "hwmon"}) {
      for (const fs::path& sensor : List(place, "hwmon")) {
        const std::optional<int64_t> thousandths = ReadNumber(sensor / "temp1_input");
        if (thousandths) return static_cast<double>(*thousandths) / 1000;
      }
    }
  }
  return std::nullopt;
}

absl::StatusOr<SmartLog> ReadSmartLog(const std::vector<fs::path>& controllers,
                                      const DriveSources& sources) {
  absl::Status first = absl::NotFoundError("it has no controller in /sys");
  for (size_t i = 0; i < controllers.size(); ++i) {
    const std::string node = sources.root + "/dev/" + controllers[i].filename().string();
    absl::StatusOr<std::vector<std::byte>> page = sources.smart_log(node);
    absl::StatusOr<SmartLog> log = page.ok() ? ParseSmartLog(*page) : page.status();
    if (log.ok()) return log;
    if (i == 0) first = log.status();
  }
  return first;
}

// eMMC: two estimates of the part of its life that is used, in tenths, as "0x02 0x01".
std::optional<double> EmmcUsedPercent(const fs::path& drive) {
  const std::optional<std::string> text = ReadText(drive / "device" / "life_time");
  if (!text) return std::nullopt;
  std::istringstream words(*text);
  std::string word;
  uint32_t most = 0;
  while (words >> word) {
    uint32_t tenths = 0;
    if (absl::SimpleHexAtoi(word, &tenths) && tenths <= 11) most = std::max(most, tenths);
  }
  if (most == 0) return std::nullopt;
  return 10.0 * most;
}

absl::StatusOr<std::vector<std::byte>> RequestSmartLog(const std::string& device) {
  constexpr uint8_t get_log_page = 0x02;
  constexpr uint32_t smart_page = 0x02;
  constexpr uint32_t all_namespaces = 0xffffffff;
  constexpr uint32_t timeout_ms = 5000;
  const UniqueFd fd(::open(device.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoError(errno, "open", device);
  std::vector<std::byte> page(kSmartLogBytes);
  nvme_admin_cmd command = {};
  command.opcode = get_log_page;
  command.nsid = all_namespaces;
  command.addr = reinterpret_cast<uintptr_t>(page.data());
  command.data_len = kSmartLogBytes;
  command.cdw10 = smart_page | (kSmartLogBytes / 4 - 1) << 16;  // words, less one
  command.timeout_ms = timeout_ms;
  const int result = ::ioctl(fd.get(), NVME_IOCTL_ADMIN_CMD, &command);
  if (result < 0) return ErrnoError(errno, "Get Log Page of", device);
  if (result > 0) {
    return absl::InternalError(
        absl::StrFormat("%s: Get Log Page ended with NVMe status 0x%x", device, result));
  }
  return page;
}

}  // namespace

DriveSources SystemDriveSources() { return {.root = "", .smart_log = RequestSmartLog}; }

absl::StatusOr<std::vector<std::string>> DrivesOfDevice(dev_t device, const DriveSources& sources) {
  return DrivesBelow(sources.root + "/sys/dev/block/" +
                     absl::StrCat(major(device), ":", minor(device)));
}

absl::StatusOr<std::vector<std::string>> DrivesBehind(const std::string& path,
                                                      const DriveSources& sources) {
  struct stat file = {};
  if (::stat(path.c_str(), &file) != 0) return ErrnoError(errno, "stat", path);
  if (major(file.st_dev) != 0) return DrivesOfDevice(file.st_dev, sources);
  const std::optional<std::string> source = MountSource(file.st_dev, sources);
  if (!source) return absl::NotFoundError(path + " lies on no block device");
  std::error_code error;
  const fs::path node = fs::canonical(sources.root + *source, error);
  if (error) return ErrnoError(error.value(), "find", *source);
  return DrivesBelow(fs::path(sources.root + "/sys/class/block") / node.filename());
}

DriveHealth ReadDriveHealth(const std::string& name, const DriveSources& sources) {
  const fs::path drive = fs::path(sources.root + "/sys/block") / name;
  DriveHealth health;
  health.name = name;
  health.model = ReadText(drive / "device" / "model").value_or("");
  health.bytes = static_cast<uint64_t>(ReadNumber(drive / "size").value_or(0)) * kSectorBytes;
  health.rotational = ReadNumber(drive / "queue" / "rotational").value_or(0) == 1;
  const bool nvme = name.starts_with("nvme");
  std::vector<fs::path> devices = nvme ? ControllersOf(drive) : std::vector<fs::path>{};
  if (nvme) {
    const absl::StatusOr<SmartLog> log = ReadSmartLog(devices, sources);
    if (log.ok()) {
      health.temperature_celsius = log->temperature_celsius;
      health.used_percent = log->used_percent;
      health.media_errors = log->media_errors;
      health.written_bytes = log->written_bytes;
      health.critical_warning = log->critical_warning;
    } else {
      health.missing.push_back(absl::StrCat("no wear and media errors: ", log.status().message()));
    }
  } else {
    health.used_percent = EmmcUsedPercent(drive);
    health.missing.emplace_back(health.used_percent
                                    ? "no media errors: not an NVMe drive"
                                    : "no wear and media errors: not an NVMe drive");
  }
  devices.push_back(drive / "device");
  if (!health.temperature_celsius) health.temperature_celsius = SensorTemperature(devices);
  if (!health.temperature_celsius) {
    health.missing.emplace_back("no temperature: /sys has no sensor of it");
  }
  return health;
}

std::string DescribeDrive(const DriveHealth& drive) {
  std::string text = drive.name + " (";
  if (!drive.model.empty()) text += drive.model + ", ";
  absl::StrAppendFormat(&text, "%.1f GB%s)", static_cast<double>(drive.bytes) * 1e-9,
                        drive.rotational ? ", rotating" : "");
  if (drive.temperature_celsius) {
    absl::StrAppendFormat(&text, ", %.0f C", *drive.temperature_celsius);
  }
  if (drive.used_percent) absl::StrAppendFormat(&text, ", %.0f %% used", *drive.used_percent);
  if (drive.media_errors) absl::StrAppend(&text, ", ", *drive.media_errors, " media errors");
  if (drive.written_bytes) {
    absl::StrAppendFormat(&text, ", %.1f TB written",
                          static_cast<double>(*drive.written_bytes) * 1e-12);
  }
  return text;
}

std::string DescribeCriticalWarning(uint8_t bits) {
  constexpr const char* words[] = {"spare is low",
                                   "temperature is out of range",
                                   "reliability is degraded",
                                   "read-only",
                                   "backup of its volatile memory failed",
                                   "its persistent memory region is unreliable"};
  std::vector<std::string> said;
  for (size_t bit = 0; bit < 8; ++bit) {
    if ((bits >> bit & 1) == 0) continue;
    said.push_back(bit < std::size(words) ? words[bit] : absl::StrCat("bit ", bit));
  }
  return absl::StrJoin(said, ", ");
}

}  // namespace zeroshard
