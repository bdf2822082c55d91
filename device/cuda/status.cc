// What errors of the driver mean, and what to do about them.
#include <algorithm>
#include <iterator>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "device/cuda/driver.h"

namespace zeroshard {
namespace {

constexpr char kPayload[] = "zeroshard/cuda_error";

struct Meaning {
  CUresult result;
  absl::StatusCode code;
  const char* advice;
};

constexpr char kLost[] =
    "the device is lost to this process, end it; dmesg (NVRM, Xid) and nvidia-smi tell the cause";
constexpr char kMismatch[] =
    "libcuda.so.1 and the kernel module are of different versions: reboot, or reload the module";
constexpr char kFabric[] = "start nvidia-fabricmanager, and see nvidia-smi -q for its state";
constexpr char kMps[] = "see the logs of nvidia-cuda-mps-control, or stop MPS";
constexpr char kNoDevice[] =
    "nvidia-smi must list a GPU; see CUDA_VISIBLE_DEVICES and, in a container, its --gpus";
constexpr char kBusy[] =
    "another process may hold it: set the compute mode to default (nvidia-smi -c 0), or use MPS";

constexpr absl::StatusCode kGone = absl::StatusCode::kAborted;
constexpr absl::StatusCode kAway = absl::StatusCode::kUnavailable;
constexpr absl::StatusCode kUnfit = absl::StatusCode::kFailedPrecondition;

// All that is not here is Internal: wrong arguments, or what we know nothing of.
constexpr Meaning kMeanings[] = {
    {CUDA_ERROR_OUT_OF_MEMORY, absl::StatusCode::kResourceExhausted, ""},
    {CUDA_ERROR_NOT_INITIALIZED, kAway,
     "CUDA does not survive fork: use it in the process that started it (spawn, not fork)"},
    {CUDA_ERROR_DEINITIALIZED, kAway, "the process is ending"},
    {CUDA_ERROR_STUB_LIBRARY, kAway, "this is the toolkit's stub; install the NVIDIA driver"},
    {CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, kUnfit, "install a newer NVIDIA driver"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, kAway, kBusy},
    {CUDA_ERROR_NO_DEVICE, kAway, kNoDevice},
    {CUDA_ERROR_INVALID_DEVICE, absl::StatusCode::kNotFound, kNoDevice},
    {CUDA_ERROR_DEVICE_NOT_LICENSED, kUnfit, "the virtual GPU has no licence"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, kUnfit, "this build has no code for this kind of GPU"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, kUnfit, "install a newer NVIDIA driver"},
    {CUDA_ERROR_JIT_COMPILER_NOT_FOUND, kUnfit, "install libnvidia-ptxjitcompiler.so.1"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, kGone, kLost},
    {CUDA_ERROR_NVLINK_UNCORRECTABLE, kGone, kLost},
    {CUDA_ERROR_CONTAINED, kGone, kLost},
    {CUDA_ERROR_ILLEGAL_ADDRESS, kGone, kLost},
    {CUDA_ERROR_LAUNCH_TIMEOUT, kGone, kLost},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, kGone, kLost},
    {CUDA_ERROR_ASSERT, kGone, kLost},
    {CUDA_ERROR_HARDWARE_STACK_ERROR, kGone, kLost},
    {CUDA_ERROR_ILLEGAL_INSTRUCTION, kGone, kLost},
    {CUDA_ERROR_MISALIGNED_ADDRESS, kGone, kLost},
    {CUDA_ERROR_INVALID_ADDRESS_SPACE, kGone, kLost},
    {CUDA_ERROR_INVALID_PC, kGone, kLost},
    {CUDA_ERROR_LAUNCH_FAILED, kGone, kLost},
    {CUDA_ERROR_TENSOR_MEMORY_LEAK, kGone, kLost},
    {CUDA_ERROR_MPS_CLIENT_TERMINATED, kGone, kMps},
    {CUDA_ERROR_EXTERNAL_DEVICE, kGone, kLost},
    {CUDA_ERROR_OPERATING_SYSTEM, kAway, "dmesg may tell more"},
    {CUDA_ERROR_NOT_READY, kAway, ""},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, absl::StatusCode::kAlreadyExists, ""},
    {CUDA_ERROR_NOT_PERMITTED, absl::StatusCode::kPermissionDenied, ""},
    {CUDA_ERROR_NOT_SUPPORTED, kUnfit, "this GPU or driver does not have the function"},
    {CUDA_ERROR_SYSTEM_NOT_READY, kAway, kFabric},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, kUnfit, kMismatch},
    {CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, kUnfit,
     "CUDA's compatibility package does not know this GPU; install a newer NVIDIA driver"},
    {CUDA_ERROR_MPS_CONNECTION_FAILED, kAway, kMps},
    {CUDA_ERROR_MPS_RPC_FAILURE, kAway, kMps},
    {CUDA_ERROR_MPS_SERVER_NOT_READY, kAway, kMps},
    {CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, kAway, kMps},
    {CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED, kAway, kMps},
    {CUDA_ERROR_TIMEOUT, absl::StatusCode::kDeadlineExceeded, ""},
    {CUDA_ERROR_UNKNOWN, absl::StatusCode::kInternal, "dmesg (NVRM) may tell more"},
};

Meaning MeaningOf(CUresult result) {
  const auto* found =
      std::find_if(std::begin(kMeanings), std::end(kMeanings),
                   [result](const Meaning& meaning) { return meaning.result == result; });
  if (found != std::end(kMeanings)) return *found;
  return {result, absl::StatusCode::kInternal, ""};
}

std::string WordsOf(CUresult result) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  const char* words = nullptr;
  const char* name = nullptr;
  if (driver.ok()) {
    if ((*driver)->GetErrorString(result, &words) != CUDA_SUCCESS) words = nullptr;
    if ((*driver)->GetErrorName(result, &name) != CUDA_SUCCESS) name = nullptr;
  }
  return absl::StrCat(
      words == nullptr ? "error" : words, " (",
      name == nullptr ? absl::StrCat("CUDA error ", static_cast<int>(result)) : std::string(name),
      ")");
}

}  // namespace

absl::Status CudaStatus(CUresult result, std::string_view what) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const Meaning meaning = MeaningOf(result);
  std::string text =
      absl::StrCat(meaning.code == kGone ? "device lost: " : "", Abs(what), ": ", WordsOf(result));
  if (meaning.advice[0] != '\0') absl::StrAppend(&text, ": ", meaning.advice);
  absl::Status status(meaning.code, text);
  status.SetPayload(kPayload, absl::Cord(absl::StrCat(static_cast<int>(result))));
  return status;
}

std::optional<CUresult> CudaErrorOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayload);
  int number = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &number)) {
    return std::nullopt;
  }
  return static_cast<CUresult>(number);
}

bool IsDeviceLost(const absl::Status& status) {
  const std::optional<CUresult> result = CudaErrorOf(status);
  return result.has_value() && MeaningOf(*result).code == kGone;
}

absl::StatusOr<const CudaDriver*> InitializeCuda() {
  ZS_ASSIGN_OR_RETURN(const CudaDriver* driver, CudaDriver::Load());
  ZS_RETURN_IF_ERROR(Annotate(CudaStatus(driver->Init(0), "cuInit"), "no CUDA device"));
  return driver;
}

bool IsMemoryFailure(const absl::Status& status) {
  const std::optional<CUresult> result = CudaErrorOf(status);
  return result == CUDA_ERROR_ECC_UNCORRECTABLE || result == CUDA_ERROR_CONTAINED ||
         result == CUDA_ERROR_HARDWARE_STACK_ERROR;
}

}  // namespace zeroshard
