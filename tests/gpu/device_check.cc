// Checks of device memory on the first CUDA device, for tests/gpu/run. One line of JSON a check or
// figure, on stdout.
//
//   device_check sharing OWNER_PROGRAM   memory of another process
//   (tests/device/cuda/memory_owner):
//                                        handed over, alive after kill -9, and left alone then
//   device_check copies MIB              copies from host memory: a registered memfd against memory
//                                        that CUDA has allocated
//
// Exit status: 0; 1 when a check failed, 2 without a device, 64 for wrong arguments.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "tests/device/cuda/owner_process.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(120);
constexpr uint64_t kSharedBytes = uint64_t{64} << 20;
constexpr double kWantedCopyRatio = 0.98;
constexpr int kRounds = 10;

bool EmitCheck(const std::string& name, const absl::Status& status) {
  std::string reason(status.message());
  std::replace(reason.begin(), reason.end(), '"', '\'');
  std::printf("{\"check\":\"%s\",\"passed\":%s%s}\n", name.c_str(), status.ok() ? "true" : "false",
              status.ok() ? "" : absl::StrCat(",\"reason\":\"", reason, "\"").c_str());
  std::fflush(stdout);
  return status.ok();
}

absl::StatusOr<std::vector<uint8_t>> Read(const CudaDevice& device, const DeviceMemory& memory) {
  std::vector<uint8_t> bytes(memory.bytes());
  ZS_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(device, StreamPriority::kNormal));
  ZS_RETURN_IF_ERROR(stream.CopyToHost(bytes.data(), memory.address(), bytes.size()));
  ZS_RETURN_IF_ERROR(stream.Synchronize(kDeadline));
  return bytes;
}

absl::Status ExpectAll(const CudaDevice& device, const DeviceMemory& memory, uint8_t wanted) {
  ZS_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, Read(device, memory));
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != wanted) {
      return absl::DataLossError(absl::StrCat("byte ", i, " is ", bytes[i], ", not ", wanted));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHandOver(const CudaDevice& device, OwnerProcess& owner, DeviceMemory& memory) {
  ZS_ASSIGN_OR_RETURN(memory,
                      DeviceMemory::Import(device, owner.fd(), kSharedBytes, Access::kReadWrite));
  ZS_RETURN_IF_ERROR(ExpectAll(device, memory, 1));
  ZS_RETURN_IF_ERROR(owner.FillAgain());
  return ExpectAll(device, memory, 2);
}

absl::Status CheckSurvival(const CudaDevice& device, OwnerProcess& owner,
                           const DeviceMemory& memory) {
  ZS_RETURN_IF_ERROR(owner.Kill());
  ZS_RETURN_IF_ERROR(ExpectAll(device, memory, 2));
  // A successor that has the descriptor from whoever kept it.
  ZS_ASSIGN_OR_RETURN(const DeviceMemory again,
                      DeviceMemory::Import(device, owner.fd(), kSharedBytes, Access::kReadWrite));
  return ExpectAll(device, again, 2);
}

// After a process was killed in the middle of its work on the device and was reaped, that work has
// ended: what it wrote to does not change any more.
absl::Status CheckNoLateWrites(const CudaDevice& device, OwnerProcess owner) {
  ZS_ASSIGN_OR_RETURN(const DeviceMemory memory,
                      DeviceMemory::Import(device, owner.fd(), kSharedBytes, Access::kReadWrite));
  ZS_RETURN_IF_ERROR(owner.KeepBusy());
  ZS_RETURN_IF_ERROR(owner.Kill());
  ZS_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, Read(device, memory));
  for (int look = 0; look < 5; ++look) {
    absl::SleepFor(absl::Milliseconds(50));
    ZS_ASSIGN_OR_RETURN(const std::vector<uint8_t> later, Read(device, memory));
    if (later != bytes) return absl::DataLossError("memory changed after its writer was reaped");
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> CheckSharing(const CudaDevice& device, const std::string& program) {
  ZS_ASSIGN_OR_RETURN(OwnerProcess owner, OwnerProcess::Start(program, kSharedBytes, 1));
  DeviceMemory memory;
  bool passed = EmitCheck("descriptor_hand_over", CheckHandOver(device, owner, memory));
  passed &= EmitCheck("memory_survives_kill_of_its_owner", CheckSurvival(device, owner, memory));
  ZS_ASSIGN_OR_RETURN(OwnerProcess busy, OwnerProcess::Start(program, kSharedBytes, 1));
  passed &= EmitCheck("no_writes_of_a_dead_process", CheckNoLateWrites(device, std::move(busy)));
  return passed;
}

// Host memory of the driver's own kind.
class AllocatedHost {
 public:
  static absl::StatusOr<std::unique_ptr<AllocatedHost>> Make(const CudaDevice& device,
                                                             size_t bytes) {
    const CurrentDevice current(device);
    ZS_RETURN_IF_ERROR(current.status());
    auto host = std::unique_ptr<AllocatedHost>(new AllocatedHost(device));
    ZS_RETURN_IF_ERROR(device.Error(device.driver().MemHostAlloc(&host->data_, bytes, 0),
                                    "cuMemHostAlloc", bytes));
    return host;
  }
  ~AllocatedHost() {
    const CurrentDevice current(device_);
    if (data_ != nullptr) device_.driver().MemFreeHost(data_);
  }
  void* data() const { return data_; }

 private:
  explicit AllocatedHost(const CudaDevice& device) : device_(device) {}
  const CudaDevice& device_;
  void* data_ = nullptr;
};

// Seconds of one copy, the best of kRounds that alternate between the two sources.
struct Best {
  absl::Duration registered = absl::InfiniteDuration();
  absl::Duration allocated = absl::InfiniteDuration();
};

template <typename Copy>
absl::Status Time(const CudaDevice& device, CudaStream& stream, Copy copy, absl::Duration& best) {
  ZS_ASSIGN_OR_RETURN(CudaEvent start, CudaEvent::Create(device, EventKind::kTimed));
  ZS_ASSIGN_OR_RETURN(CudaEvent end, CudaEvent::Create(device, EventKind::kTimed));
  ZS_RETURN_IF_ERROR(stream.Record(start));
  ZS_RETURN_IF_ERROR(copy());
  ZS_RETURN_IF_ERROR(stream.Record(end));
  ZS_RETURN_IF_ERROR(stream.Synchronize(kDeadline));
  ZS_ASSIGN_OR_RETURN(const absl::Duration took, end.Since(start));
  best = std::min(best, took);
  return absl::OkStatus();
}

void EmitRatio(const std::string& name, const Best& best, size_t bytes) {
  const auto speed = [bytes](absl::Duration took) {
    return static_cast<double>(bytes) / 1e9 / absl::ToDoubleSeconds(took);
  };
  std::printf(
      "{\"figure\":\"%s\",\"value\":%.4f,\"at_least\":%.2f,\"registered_memfd_gb_s\":%.2f,"
      "\"cuMemHostAlloc_gb_s\":%.2f}\n",
      name.c_str(), absl::FDivDuration(best.allocated, best.registered), kWantedCopyRatio,
      speed(best.registered), speed(best.allocated));
  std::fflush(stdout);
}

absl::StatusOr<bool> MeasureCopies(const CudaDevice& device, size_t bytes) {
  ZS_ASSIGN_OR_RETURN(const UniqueFd fd, CreateSealedMemfd("copies", bytes));
  ZS_ASSIGN_OR_RETURN(const MappedRegion region,
                      MappedRegion::Map(fd.get(), bytes, Access::kReadWrite));
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<AllocatedHost> allocated,
                      AllocatedHost::Make(device, bytes));
  std::memset(region.data(), 1, bytes);
  std::memset(allocated->data(), 1, bytes);
  ZS_ASSIGN_OR_RETURN(const RegisteredHost registered,
                      RegisteredHost::Register(device, region.bytes()));
  ZS_ASSIGN_OR_RETURN(const DeviceMemory memory, DeviceMemory::Create(device, bytes));
  ZS_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(device, StreamPriority::kNormal));
  Best up;
  Best down;
  for (int round = 0; round < kRounds; ++round) {
    const auto to_device = [&](const void* from) {
      return [&, from] { return stream.CopyToDevice(memory.address(), from, bytes); };
    };
    const auto to_host = [&](void* to) {
      return [&, to] { return stream.CopyToHost(to, memory.address(), bytes); };
    };
    ZS_RETURN_IF_ERROR(Time(device, stream, to_device(region.data()), up.registered));
    ZS_RETURN_IF_ERROR(Time(device, stream, to_device(allocated->data()), up.allocated));
    ZS_RETURN_IF_ERROR(Time(device, stream, to_host(region.data()), down.registered));
    ZS_RETURN_IF_ERROR(Time(device, stream, to_host(allocated->data()), down.allocated));
  }
  EmitRatio("host_to_device_registered_memfd_to_cuMemHostAlloc", up, bytes);
  EmitRatio("device_to_host_registered_memfd_to_cuMemHostAlloc", down, bytes);
  return true;
}

int Main(int count, char** arguments) {
  const std::string kind = count == 3 ? arguments[1] : "";
  if (kind != "sharing" && kind != "copies") {
    std::fprintf(stderr, "usage: device_check sharing OWNER_PROGRAM | copies MIB\n");
    return 64;
  }
  const absl::StatusOr<std::unique_ptr<CudaDevice>> device = CudaDevice::Open(0);
  if (!device.ok()) {
    EmitCheck(kind, device.status());
    return 2;
  }
  const absl::StatusOr<bool> passed =
      kind == "sharing"
          ? CheckSharing(**device, arguments[2])
          : MeasureCopies(**device, std::max(1ul, strtoul(arguments[2], nullptr, 10)) << 20);
  if (!passed.ok()) EmitCheck(kind, passed.status());
  return passed.ok() && *passed ? 0 : 1;
}

}  // namespace
}  // namespace zeroshard

int main(int count, char** arguments) { return zeroshard::Main(count, arguments); }
