#include "base/config.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "base/strings.h"
#include "base/unique_fd.h"

namespace zeroshard {

std::optional<std::string> Env(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

absl::Status ArmFaultPointsFromEnv() {
  const std::optional<std::string> specification = Env("ZEROSHARD_FAULTS");
  if (!specification) return absl::OkStatus();
  if (*specification == "list") {
    for (const std::string& name : FaultPointNames()) std::puts(name.c_str());
    std::exit(EXIT_SUCCESS);
  }
  return Annotate(ArmFaultPoints(*specification), "ZEROSHARD_FAULTS");
}

absl::StatusOr<std::string> ReadConfigFile(const std::string& path, size_t max_bytes) {
  // Non-blocking, so that a FIFO does not hang the open.
  UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return ErrnoError(errno, "open the configuration file", path);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) return ErrnoError(errno, "stat", path);
  if (S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is a directory: expected a configuration file"));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  std::string text(max_bytes + 1, '\0');
  size_t used = 0;
  while (used < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + used, text.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoErrorAt(errno, "read", path, used);
    if (got == 0) break;
    used += static_cast<size_t>(got);
  }
  if (used > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is longer than the limit of ", max_bytes, " bytes"));
  }
  text.resize(used);
  return text;
}

absl::StatusOr<uint64_t> ParseByteSize(std::string_view text) {
  struct Unit {
    const char* suffix;
    double factor;
  };
  // Longer suffixes first: "KiB" also ends with "B".
  static constexpr Unit kUnits[] = {
      {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"kB", 1e3},
      {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},    {"B", 1},
      {"K", 0x1p10},   {"M", 0x1p20},   {"G", 0x1p30},   {"T", 0x1p40}};
  absl::string_view number = Abs(text);
  double factor = 1;
  for (const Unit& unit : kUnits) {
    if (absl::ConsumeSuffix(&number, unit.suffix)) {
      factor = unit.factor;
      break;
    }
  }
  double value = 0;
  if (!absl::SimpleAtod(number, &value) || !std::isfinite(value) || value < 0 ||
      value * factor >= 0x1p63) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", Abs(text),
                     "\" is not a size in bytes: expected a number, or one with B, KiB, MiB, "
                     "GiB, TiB, kB, MB, GB or TB"));
  }
  return static_cast<uint64_t>(std::llround(value * factor));
}

}  // namespace zeroshard
