#include "server/gpu_probe.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/deadline.h"
#include "base/poll.h"
#include "base/status.h"
#include "base/strings.h"
#include "base/unique_fd.h"
#include "server/devices.h"

extern char** environ;

namespace zeroshard {
namespace {

using Json = nlohmann::json;

constexpr size_t kUuidBytes = 16;
constexpr size_t kMaxOutputBytes = 1 << 20;
constexpr size_t kMaxSaidBytes = 500;
constexpr std::string_view kSaidPrefix = "zeroshard-worker: ";
constexpr std::string_view kNoDevice = "no CUDA device";
constexpr std::string_view kUuidPrefixes[] = {"GPU-", "MIG-"};

std::string Text(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_string() ? it->get<std::string>() : "";
}

std::optional<uint64_t> Number(const Json& line, const char* key) {
  const auto it = line.find(key);
  if (it == line.end() || !it->is_number_integer() || it->get<int64_t>() < 0) return std::nullopt;
  return it->get<uint64_t>();
}

absl::StatusOr<Gpu> ParseLine(const Json& line) {
  Gpu gpu;
  gpu.device = Text(line, "device");
  ZS_ASSIGN_OR_RETURN(const DeviceName name, ParseDevice(gpu.device));
  gpu.ordinal = name.index;
  gpu.name = Text(line, "name");
  ZS_ASSIGN_OR_RETURN(gpu.uuid, ParseGpuUuid(Text(line, "uuid")));
  gpu.pci_bus_id = Text(line, "pci");
  gpu.compute_capability = Text(line, "compute_capability");
  if (const auto node = Number(line, "numa_node")) gpu.numa_node = static_cast<uint32_t>(*node);
  gpu.total_bytes = Number(line, "memory_bytes").value_or(0);
  const auto usable = line.find("usable");
  if (usable == line.end() || !usable->is_boolean()) {
    return absl::InternalError(absl::StrCat(gpu.device, " is neither usable nor not"));
  }
  if (!usable->get<bool>()) gpu.usable = absl::FailedPreconditionError(Text(line, "problem"));
  return gpu;
}

// A child whose standard output and standard error are read here.
struct Child {
  pid_t pid = 0;
  UniqueFd output;
};

absl::StatusOr<Child> Start(const std::string& binary) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoError(errno, "pipe2", "of the probe");
  Child child;
  child.output = UniqueFd(ends[0]);
  const UniqueFd write_end(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  std::string path = binary;
  std::string flag = "--probe";
  char* const argv[] = {path.data(), flag.data(), nullptr};
  const int error = posix_spawn(&child.pid, binary.c_str(), &actions, &attributes, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return ErrnoError(error, "posix_spawn", binary);
  return child;
}

absl::StatusOr<std::string> ReadAll(int fd, const Deadline& deadline) {
  std::string output;
  char buffer[4096];
  while (true) {
    ZS_RETURN_IF_ERROR(AwaitReady(fd, POLLIN, deadline, "waiting for the probe of GPUs"));
    const ssize_t bytes = read(fd, buffer, sizeof(buffer));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return ErrnoError(errno, "read", "the probe of GPUs");
    if (bytes == 0) return output;
    output.append(buffer, static_cast<size_t>(bytes));
    if (output.size() > kMaxOutputBytes) {
      return absl::InternalError("the probe of GPUs prints without end");
    }
  }
}

}  // namespace

std::string GpuUuidText(std::string_view uuid) {
  const std::string hex = absl::BytesToHexString(Abs(uuid));
  if (uuid.size() != kUuidBytes) return hex;
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-",
                      hex.substr(16, 4), "-", hex.substr(20));
}

absl::StatusOr<std::string> ParseGpuUuid(std::string_view text) {
  std::string_view digits = text;
  for (const std::string_view prefix : kUuidPrefixes) {
    if (digits.starts_with(prefix)) digits.remove_prefix(prefix.size());
  }
  std::string hex;
  for (const char c : digits) {
    if (c != '-') hex.push_back(c);
  }
  const bool all_hex = hex.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (hex.size() != 2 * kUuidBytes || !all_hex) {
    return absl::InternalError(absl::StrCat("\"", Abs(text), "\" is no UUID of a GPU"));
  }
  return absl::HexStringToBytes(hex);
}

absl::StatusOr<std::vector<Gpu>> ParseGpuProbe(std::string_view output) {
  std::vector<Gpu> gpus;
  std::string said;
  const std::vector<std::string> lines = absl::StrSplit(Abs(output), '\n', absl::SkipWhitespace());
  for (const std::string& line : lines) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) {
      const size_t prefix = line.starts_with(kSaidPrefix) ? kSaidPrefix.size() : 0;
      absl::StrAppend(&said, said.empty() ? "" : "; ", line.substr(prefix, kMaxSaidBytes));
      continue;
    }
    absl::StatusOr<Gpu> gpu = ParseLine(json);
    if (!gpu.ok()) {
      return absl::InternalError(absl::StrCat("the probe of GPUs: ", gpu.status().message()));
    }
    gpus.push_back(*std::move(gpu));
  }
  if (!gpus.empty()) return gpus;
  if (said.starts_with(kNoDevice)) return absl::UnavailableError(said);
  return absl::InternalError(absl::StrCat("the probe of GPUs says: ", said));
}

absl::StatusOr<std::vector<Gpu>> ProbeGpus(const std::string& worker_binary,
                                           absl::Duration timeout) {
  ZS_ASSIGN_OR_RETURN(const Child child, Start(worker_binary));
  absl::StatusOr<std::string> output = ReadAll(child.output.get(), Deadline::After(timeout));
  if (!output.ok()) kill(child.pid, SIGKILL);
  int status = 0;
  while (waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (absl::IsDeadlineExceeded(output.status())) {
    return absl::DeadlineExceededError(absl::StrCat("the driver of the GPUs did not answer within ",
                                                    absl::FormatDuration(timeout),
                                                    "; nvidia-smi may tell why"));
  }
  if (!output.ok()) return output.status();
  absl::StatusOr<std::vector<Gpu>> gpus = ParseGpuProbe(*output);
  if (!absl::IsInternal(gpus.status())) return gpus;
  return absl::InternalError(
      absl::StrCat(gpus.status().message(), " (", worker_binary, " --probe ",
                   WIFSIGNALED(status) ? absl::StrCat("was killed by signal ", WTERMSIG(status))
                                       : absl::StrCat("exited with code ", WEXITSTATUS(status)),
                   ")"));
}

}  // namespace zeroshard
