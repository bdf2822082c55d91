#include "worker/device_probe.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "device/cuda/available.h"

namespace zeroshard {
namespace {

constexpr char kUsage[] =
    "usage: zeroshard-worker --probe [cuda:<n> ...]\n"
    "Workers are started by zeroshardd, which hands them their job. --probe lists the GPUs that\n"
    "workers could use, one line of JSON each; exit code 0 when there is one (or all that are\n"
    "named can be used), 1 otherwise.\n";

int Fail(const absl::Status& status) {
  fprintf(stderr, "zeroshard-worker: %s\n", std::string(status.message()).c_str());
  return kProbeUnusable;
}

int ProbeNamed(std::span<char* const> names) {
  int code = kProbeUsable;
  for (const char* name : names) {
    const absl::Status status = CheckCudaDevice(name);
    if (status.ok()) continue;
    code = absl::IsInvalidArgument(status) ? kProbeUsage : std::max(code, kProbeUnusable);
    Fail(status);
  }
  return code;
}

}  // namespace

std::optional<int> AnswerProbe(std::span<char* const> arguments) {
  const std::string_view first = arguments.empty() ? std::string_view() : arguments.front();
  if (first == "--help") {
    fputs(kUsage, stdout);
    return kProbeUsable;
  }
  if (first != "--probe") return std::nullopt;
  if (arguments.size() > 1) return ProbeNamed(arguments.subspan(1));
  const absl::StatusOr<std::string> text = DescribeCudaDevices();
  if (!text.ok()) return Fail(text.status());
  fputs(text->c_str(), stdout);
  const absl::Status usable = CheckCudaUsable();
  return usable.ok() ? kProbeUsable : Fail(usable);
}

}  // namespace zeroshard
