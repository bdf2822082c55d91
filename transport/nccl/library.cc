#include "transport/nccl/library.h"

#include <dlfcn.h>

#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/nccl/api.h"

namespace zeroshard {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";
// Where PyTorch is built with NCCL inside.
constexpr char kTorchLibrary[] = "libtorch_cuda.so";
constexpr int kOldest = NCCL_VERSION(2, 14, 0);
constexpr int kSplits = NCCL_VERSION(2, 18, 0);
constexpr int kRegisters = NCCL_VERSION(2, 19, 0);

static_assert(sizeof(NcclUniqueId) == NCCL_UNIQUE_ID_BYTES);

struct Found {
  void* handle = nullptr;
  std::string how;
};

// The NCCL that this process has already, or the system's.
absl::StatusOr<Found> Find() {
  if (void* loaded = ::dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD); loaded != nullptr) {
    return Found{loaded, "loaded before by this process"};
  }
  if (::dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) {
    return Found{RTLD_DEFAULT, "linked into this process"};
  }
  if (void* torch = ::dlopen(kTorchLibrary, RTLD_NOW | RTLD_NOLOAD); torch != nullptr) {
    if (::dlsym(torch, "ncclGetVersion") != nullptr) return Found{torch, "PyTorch's own"};
    ::dlclose(torch);
  }
  if (void* opened = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL); opened != nullptr) {
    return Found{opened, "opened by the data plane"};
  }
  const char* why = ::dlerror();
  return absl::FailedPreconditionError(absl::StrCat(
      "no NCCL: this process has loaded no ", kLibrary, " and none can be opened (",
      why == nullptr ? "no reason given" : why,
      "); install NCCL 2.14 or newer (PyTorch for CUDA brings it) or name its folder in "
      "LD_LIBRARY_PATH"));
}

// Resolves symbols and keeps the names of those that are missing.
class Resolver {
 public:
  explicit Resolver(void* handle) : handle_(handle) {}

  template <class Function>
  void Optional(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(handle_, name));
  }
  template <class Function>
  void Required(Function& function, const char* name) {
    Optional(function, name);
    if (function == nullptr) missing_.push_back(name);
  }

  const std::vector<std::string>& missing() const { return missing_; }

 private:
  void* const handle_;
  std::vector<std::string> missing_;
};

#define ZS_NCCL_REQUIRED(name) resolver.Required(api.name, "nccl" #name)
#define ZS_NCCL_OPTIONAL(name) resolver.Optional(api.name, "nccl" #name)

std::vector<std::string> Resolve(void* handle, NcclApi& api) {
  Resolver resolver(handle);
  ZS_NCCL_REQUIRED(GetVersion);
  ZS_NCCL_REQUIRED(GetUniqueId);
  ZS_NCCL_REQUIRED(GetErrorString);
  ZS_NCCL_REQUIRED(GetLastError);
  ZS_NCCL_REQUIRED(CommInitRankConfig);
  ZS_NCCL_REQUIRED(CommFinalize);
  ZS_NCCL_REQUIRED(CommDestroy);
  ZS_NCCL_REQUIRED(CommAbort);
  ZS_NCCL_REQUIRED(CommGetAsyncError);
  ZS_NCCL_REQUIRED(GroupStart);
  ZS_NCCL_REQUIRED(GroupEnd);
  ZS_NCCL_REQUIRED(AllGather);
  ZS_NCCL_REQUIRED(Broadcast);
  ZS_NCCL_REQUIRED(Send);
  ZS_NCCL_REQUIRED(Recv);
  ZS_NCCL_OPTIONAL(CommSplit);
  ZS_NCCL_OPTIONAL(CommRegister);
  ZS_NCCL_OPTIONAL(CommDeregister);
  return resolver.missing();
}

// 22809 -> "2.28.9"; before 2.9 the code had one digit less for the minor version.
std::string VersionText(int version) {
  const int base = version < 10000 ? 1000 : 10000;
  return absl::StrCat(version / base, ".", version % base / 100, ".", version % 100);
}

std::string PathOf(const NcclApi& api) {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<void*>(api.GetVersion), &info) == 0 || info.dli_fname == nullptr) {
    return "path unknown";
  }
  return info.dli_fname;
}

}  // namespace

absl::StatusOr<NcclLibrary> NcclLibrary::Load() {
  absl::StatusOr<Found> found = Find();
  if (!found.ok()) return found.status();
  auto api = std::make_shared<NcclApi>();
  const std::vector<std::string> missing = Resolve(found->handle, *api);
  int version = 0;
  if (api->GetVersion == nullptr || api->GetVersion(&version) != ncclSuccess) version = 0;
  const std::string description =
      absl::StrCat("NCCL ", VersionText(version), ", ", found->how, " (", PathOf(*api), ")");
  if (version < kSplits) api->CommSplit = nullptr;
  if (version < kRegisters) api->CommRegister = nullptr;
  if (version < kOldest || !missing.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        description, " cannot be used: 2.14 or newer is needed",
        missing.empty() ? "" : absl::StrCat(", it has no ", absl::StrJoin(missing, ", "))));
  }
  return NcclLibrary(std::move(api), version, description);
}

bool NcclLibrary::can_register() const {
  return api_->CommRegister != nullptr && api_->CommDeregister != nullptr;
}

bool NcclLibrary::can_split() const { return api_->CommSplit != nullptr; }

absl::StatusOr<NcclUniqueId> NcclLibrary::MakeUniqueId() const {
  ncclUniqueId made = {};
  if (const ncclResult_t result = api_->GetUniqueId(&made); result != ncclSuccess) {
    return absl::UnavailableError(
        absl::StrCat("NCCL makes no unique id: ", api_->GetErrorString(result), " (",
                     api_->GetLastError(nullptr),
                     "); the network that it uses for set-up is chosen by NCCL_SOCKET_IFNAME"));
  }
  NcclUniqueId id;
  std::memcpy(id.data(), made.internal, id.size());
  return id;
}

}  // namespace zeroshard
