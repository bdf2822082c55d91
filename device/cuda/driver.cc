#include "device/cuda/driver.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/strings.h"

#define ZS_TEXT_INNER_(text) #text
#define ZS_TEXT_(text) ZS_TEXT_INNER_(text)

namespace zeroshard {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr char kInstall[] =
    "install the NVIDIA driver (580 or newer), in a container let its tools mount it (docker run "
    "--gpus all), or use --device cpu:0";

// What the error of dlopen or dlsym is; the loader clears it.
std::string LoaderError() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

std::string PathOf(void* function) {
  Dl_info info = {};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return kLibrary;
  return info.dli_fname;
}

absl::Status TooOld(const CudaDriver& driver, std::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat("no CUDA device: the driver (", driver.path, ") supports CUDA ",
                   CudaVersionText(driver.version), ", but this build needs CUDA ",
                   CudaVersionText(kCudaToolkitVersion), Abs(what),
                   ": install a newer NVIDIA driver, or build with an older toolkit"));
}

// Minor versions of a toolkit run on any driver of the same major version.
bool Supports(int driver, int toolkit) { return driver / 1000 >= toolkit / 1000; }

absl::StatusOr<const CudaDriver*> LoadOnce() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError(absl::StrCat("no CUDA device: ", kLibrary, " cannot be opened (",
                                               LoaderError(), "): ", kInstall));
  }
  auto* driver = new CudaDriver;  // for the life of the process, like the library
  const char* missing = nullptr;
#define ZS_CUDA_FIND(name, function)                                                           \
  driver->name = reinterpret_cast<decltype(driver->name)>(dlsym(library, ZS_TEXT_(function))); \
  if (driver->name == nullptr && missing == nullptr) missing = ZS_TEXT_(function);
  ZS_CUDA_FUNCTIONS(ZS_CUDA_FIND)
#undef ZS_CUDA_FIND
  if (driver->DriverGetVersion == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no CUDA device: ", kLibrary, " is not a CUDA driver (", LoaderError(), "): ", kInstall));
  }
  driver->path = PathOf(reinterpret_cast<void*>(driver->DriverGetVersion));
  const CUresult result = driver->DriverGetVersion(&driver->version);
  if (result != CUDA_SUCCESS) {
    return absl::UnavailableError(absl::StrCat("no CUDA device: cuDriverGetVersion of ",
                                               driver->path, " failed with error ",
                                               static_cast<int>(result), ": ", kInstall));
  }
  if (!Supports(driver->version, kCudaToolkitVersion)) return TooOld(*driver, "");
  if (missing != nullptr) {
    return TooOld(*driver, absl::StrCat(" and the driver has no ", missing));
  }
  return driver;
}

}  // namespace

std::string CudaVersionText(int version) {
  return absl::StrFormat("%d.%d", version / 1000, version % 1000 / 10);
}

absl::StatusOr<const CudaDriver*> CudaDriver::Load() {
  static const absl::StatusOr<const CudaDriver*>& loaded =
      *new absl::StatusOr<const CudaDriver*>(LoadOnce());
  return loaded;
}

}  // namespace zeroshard
