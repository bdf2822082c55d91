#include "device/cuda/device.h"

#include <cctype>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

std::string LabelOf(int ordinal) { return absl::StrCat("cuda:", ordinal); }

std::string CapabilityText(ComputeCapability capability) {
  return absl::StrCat(capability.major, ".", capability.minor);
}

absl::Status Refused(const CudaDeviceInfo& info, std::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat(LabelOf(info.ordinal), " (", info.name, ") ", Abs(why)));
}

// What a device must be able to do, and what it is called when it cannot.
struct Need {
  CUdevice_attribute attribute;
  const char* without;
};

constexpr Need kNeeds[] = {
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "has no unified addresses"},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
     "cannot map memory at chosen addresses"},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
     "cannot share memory between processes by descriptor"},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
     "has no 64-bit waits and writes of streams, by which processes order their work"},
};

absl::Status CheckSupported(const CudaDriver& driver, CUdevice device, const CudaDeviceInfo& info) {
  ZS_RETURN_IF_ERROR(CheckComputeCapability(
      info.compute_capability, absl::StrCat(LabelOf(info.ordinal), " (", info.name, ")")));
  if (IsMigSlice(info.name)) {
    return Refused(info,
                   "is a MIG slice: its ranks could not reach one another by NCCL; turn MIG off "
                   "(nvidia-smi -mig 0) or name a whole GPU");
  }
  int mode = 0;
  ZS_RETURN_IF_ERROR(
      CudaStatus(driver.DeviceGetAttribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device),
                 "cuDeviceGetAttribute of the compute mode"));
  if (mode == CU_COMPUTEMODE_PROHIBITED) {
    return Refused(info, "has compute mode \"prohibited\": nvidia-smi -c 0 allows processes again");
  }
  for (const Need& need : kNeeds) {
    int has = 0;
    ZS_RETURN_IF_ERROR(CudaStatus(driver.DeviceGetAttribute(&has, need.attribute, device),
                                  "cuDeviceGetAttribute"));
    if (has == 0) return Refused(info, need.without);
  }
  return absl::OkStatus();
}

std::string LowerCase(std::string text) {
  for (char& letter : text) letter = static_cast<char>(tolower(static_cast<unsigned char>(letter)));
  return text;
}

// Of the device's properties; `usable` is not judged yet.
absl::StatusOr<CudaDeviceInfo> ReadInfo(const CudaDriver& driver, CUdevice device, int ordinal) {
  const std::string what = absl::StrCat("asking for properties of ", LabelOf(ordinal));
  CudaDeviceInfo info;
  info.ordinal = ordinal;
  char text[256] = {};
  ZS_RETURN_IF_ERROR(CudaStatus(driver.DeviceGetName(text, sizeof(text) - 1, device), what));
  info.name = text;
  CUuuid uuid = {};
  ZS_RETURN_IF_ERROR(CudaStatus(driver.DeviceGetUuid(&uuid, device), what));
  for (size_t i = 0; i < info.uuid.size(); ++i) info.uuid[i] = static_cast<uint8_t>(uuid.bytes[i]);
  char pci[32] = {};
  ZS_RETURN_IF_ERROR(CudaStatus(driver.DeviceGetPCIBusId(pci, sizeof(pci) - 1, device), what));
  info.pci_bus_id = LowerCase(pci);
  ZS_RETURN_IF_ERROR(
      CudaStatus(driver.DeviceGetAttribute(&info.compute_capability.major,
                                           CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
                 what));
  ZS_RETURN_IF_ERROR(
      CudaStatus(driver.DeviceGetAttribute(&info.compute_capability.minor,
                                           CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
                 what));
  size_t total = 0;
  ZS_RETURN_IF_ERROR(CudaStatus(driver.DeviceTotalMem(&total, device), what));
  info.total_memory = total;
  return info;
}

absl::StatusOr<int> CountDevices(const CudaDriver& driver) {
  int count = 0;
  ZS_RETURN_IF_ERROR(CudaStatus(driver.DeviceGetCount(&count), "cuDeviceGetCount"));
  if (count == 0) {
    return Annotate(CudaStatus(CUDA_ERROR_NO_DEVICE, "cuDeviceGetCount"), "no CUDA device");
  }
  return count;
}

struct Found {
  CUdevice handle = 0;
  CudaDeviceInfo info;
};

absl::StatusOr<Found> FindDevice(const CudaDriver& driver, int ordinal) {
  Found found;
  ZS_RETURN_IF_ERROR(CudaStatus(driver.DeviceGet(&found.handle, ordinal),
                                absl::StrCat("cuDeviceGet of ", LabelOf(ordinal))));
  ZS_ASSIGN_OR_RETURN(found.info, ReadInfo(driver, found.handle, ordinal));
  found.info.usable = CheckSupported(driver, found.handle, found.info);
  return found;
}

}  // namespace

std::string UuidText(const DeviceUuid& uuid) {
  std::string text = "GPU";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", uuid[i]);
  }
  return text;
}

absl::Status CheckComputeCapability(ComputeCapability found, std::string_view device) {
  if (found >= kOldestComputeCapability && found.major <= kNewestKnownMajor) {
    return absl::OkStatus();
  }
  const bool old = found < kOldestComputeCapability;
  return absl::FailedPreconditionError(
      absl::StrCat(Abs(device), " has compute capability ", CapabilityText(found), ", which is ",
                   old ? "too old" : "not known to this build", ": it supports ",
                   CapabilityText(kOldestComputeCapability), " to ", kNewestKnownMajor, ".x; ",
                   old ? "use a newer GPU (A100 or later)" : "use a newer version of ZeroShard",
                   ", or --device cpu:0"));
}

absl::StatusOr<int> CudaOrdinal(std::string_view name) {
  constexpr std::string_view kPrefix = "cuda:";
  int ordinal = -1;
  if (name.substr(0, kPrefix.size()) != kPrefix ||
      !absl::SimpleAtoi(Abs(name.substr(kPrefix.size())), &ordinal) || ordinal < 0 ||
      name != LabelOf(ordinal)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", Abs(name), "\" is no CUDA device; expected one as cuda:0"));
  }
  return ordinal;
}

absl::Status NoSuchDevice(int ordinal, size_t count) {
  return absl::NotFoundError(absl::StrCat("no device ", LabelOf(ordinal), ": this process sees ",
                                          count, " (cuda:0 to cuda:", count - 1,
                                          "); see nvidia-smi -L and CUDA_VISIBLE_DEVICES"));
}

bool IsMigSlice(std::string_view name) { return name.find(" MIG ") != std::string_view::npos; }

absl::StatusOr<std::vector<CudaDeviceInfo>> ListCudaDevices() {
  ZS_ASSIGN_OR_RETURN(const CudaDriver* driver, InitializeCuda());
  ZS_ASSIGN_OR_RETURN(const int count, CountDevices(*driver));
  std::vector<CudaDeviceInfo> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    ZS_ASSIGN_OR_RETURN(Found found, FindDevice(*driver, ordinal));
    devices.push_back(std::move(found.info));
  }
  return devices;
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Open(int ordinal) {
  ZS_ASSIGN_OR_RETURN(const CudaDriver* driver, InitializeCuda());
  ZS_ASSIGN_OR_RETURN(const int count, CountDevices(*driver));
  if (ordinal < 0 || ordinal >= count) {
    return NoSuchDevice(ordinal, static_cast<size_t>(count));
  }
  ZS_ASSIGN_OR_RETURN(Found found, FindDevice(*driver, ordinal));
  ZS_RETURN_IF_ERROR(found.info.usable);
  auto device = absl::WrapUnique(new CudaDevice(*driver, std::move(found.info)));
  device->handle_ = found.handle;
  ZS_RETURN_IF_ERROR(device->Retain());
  return device;
}

absl::Status CudaDevice::Retain() {
  const auto attribute = [this](CUdevice_attribute which, int& value) {
    return Error(driver_.DeviceGetAttribute(&value, which, handle_), "cuDeviceGetAttribute");
  };
  ZS_RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, multiprocessors_));
  int rdma = 0;
  ZS_RETURN_IF_ERROR(attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, rdma));
  rdma_ = rdma != 0;
  const CUmemAllocationProp properties = SharedMemoryProperties();
  ZS_RETURN_IF_ERROR(Error(driver_.MemGetAllocationGranularity(&granularity_, &properties,
                                                               CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                           "cuMemGetAllocationGranularity"));
  CUcontext context = nullptr;
  ZS_RETURN_IF_ERROR(
      Error(driver_.DevicePrimaryCtxRetain(&context, handle_), "cuDevicePrimaryCtxRetain"));
  context_ = context;
  return absl::OkStatus();
}

CudaDevice::~CudaDevice() {
  if (context_ != nullptr) driver_.DevicePrimaryCtxRelease(handle_);
}

std::string CudaDevice::label() const { return LabelOf(info_.ordinal); }

absl::Status CudaDevice::MakeCurrent() const {
  return Error(driver_.CtxSetCurrent(context_), "cuCtxSetCurrent");
}

absl::StatusOr<DeviceMemoryInfo> CudaDevice::Memory() const {
  const CurrentDevice current(*this);
  ZS_RETURN_IF_ERROR(current.status());
  size_t free = 0;
  size_t total = 0;
  const CUresult result = driver_.MemGetInfo(&free, &total);
  if (result != CUDA_SUCCESS) return CudaStatus(result, absl::StrCat(label(), ": cuMemGetInfo"));
  return DeviceMemoryInfo{free, total};
}

CUmemAllocationProp CudaDevice::SharedMemoryProperties() const {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = handle_;
  properties.allocFlags.gpuDirectRDMACapable = rdma_ ? 1 : 0;
  return properties;
}

absl::Status CudaDevice::Error(CUresult result, std::string_view what, uint64_t bytes) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  std::string text = absl::StrCat(label(), " (", info_.name, "): ", Abs(what));
  if (bytes >= uint64_t{1} << 20) {
    absl::StrAppend(&text, " of ", bytes >> 20, " MiB (", bytes, " bytes)");
  } else if (bytes > 0) {
    absl::StrAppend(&text, " of ", bytes, " bytes");
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY && context_ != nullptr) {
    const absl::StatusOr<DeviceMemoryInfo> memory = Memory();
    if (memory.ok()) {
      absl::StrAppend(&text, ", of the device's ", memory->total >> 20, " MiB ", memory->free >> 20,
                      " MiB are free");
    }
  }
  return CudaStatus(result, text);
}

CurrentDevice::CurrentDevice(const CudaDevice& device)
    : device_(device),
      status_(CudaStatus(device.driver().CtxPushCurrent(device.context()), "cuCtxPushCurrent")) {}

CurrentDevice::~CurrentDevice() {
  if (!status_.ok()) return;
  CUcontext popped = nullptr;
  device_.driver().CtxPopCurrent(&popped);
}

}  // namespace zeroshard
