#ifndef ZEROSHARD_TESTS_FAKES_CUDA_RUNTIME_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_RUNTIME_H_

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/fakes/cuda/errors.h"
#include "tests/fakes/cuda/fake_kernels.h"
#include "tests/fakes/cuda/memory_map.h"
#include "tests/fakes/cuda/physical.h"
#include "tests/fakes/cuda/settings.h"
#include "tests/fakes/cuda/stream.h"

namespace zeroshard::fake_cuda {

enum class Need { kNothing, kInit, kContext };
enum class OperationFate { kRuns, kHangs };

// A library that was loaded, and the functions found in it. CUmodule, CUlibrary: one kind here.
struct Module {
  Context* context = nullptr;  // null for libraries
};
struct Function {
  std::string name;
  const FakeKernel* kernel = nullptr;
  Module* module = nullptr;
  int max_dynamic_shared = 48 << 10;
};

// Handles of one type, by address.
template <typename T>
class Handles {
 public:
  template <typename Handle>
  Handle Add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mu_);
    T* const address = object.get();
    objects_[reinterpret_cast<uint64_t>(address)] = std::move(object);
    return reinterpret_cast<Handle>(address);
  }
  template <typename Handle>
  std::shared_ptr<T> Find(Handle handle) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto it = objects_.find((uint64_t)handle);
    return it == objects_.end() ? nullptr : it->second;
  }
  template <typename Handle>
  std::shared_ptr<T> Remove(Handle handle) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto it = objects_.find((uint64_t)handle);
    if (it == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(it->second);
    objects_.erase(it);
    return object;
  }
  std::vector<std::shared_ptr<T>> All() {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<std::shared_ptr<T>> all;
    for (const auto& [address, object] : objects_) all.push_back(object);
    return all;
  }

 private:
  std::mutex mu_;
  std::map<uint64_t, std::shared_ptr<T>> objects_;  // guarded by mu_
};

// A CUmemGenericAllocationHandle: as often as it was created, imported or retained.
struct MemoryHandle {
  std::shared_ptr<Physical> memory;
  int references = 1;
};

// The driver's state in this process; never destroyed, since streams end after main.
class Runtime {
 public:
  static Runtime& Get();

  // How every function of the API begins: counts the call, and says whether it fails at once.
  CUresult Enter(const char* function, Need need);
  CUresult Init();
  void Reset(const Settings& settings);
  uint64_t Calls(const std::string& api);
  void Count(const std::string& what);

  const Settings& settings() const { return *settings_; }
  uint64_t generation() const { return generation_; }
  MemoryMap& memory() { return *memory_; }
  Pool& pool() { return *pool_; }

  // --- Devices: `ordinal` counts those that CUDA_VISIBLE_DEVICES shows, `device` those of the node
  // ---
  int visible() const { return static_cast<int>(visible_.size()); }
  int DeviceOf(CUdevice ordinal) const { return visible_[static_cast<size_t>(ordinal)]; }
  CUdevice OrdinalOf(int device) const;  // -1: not visible
  bool IsOrdinal(CUdevice ordinal) const { return ordinal >= 0 && ordinal < visible(); }

  CUresult LostError(int device);
  void Lose(int device, CUresult error);
  OperationFate CountOperation(int device);

  // --- Contexts ---
  Context* RetainPrimary(CUdevice ordinal);
  CUresult ReleasePrimary(CUdevice ordinal);
  Context* PrimaryOf(CUdevice ordinal);  // null before the first Retain
  Context* NewContext(CUdevice ordinal, unsigned flags);
  bool IsContext(Context* context);
  void DestroyContext(Context* context);
  static std::vector<Context*>& Stack();  // of the calling thread; the last one is current
  static Context* Current() { return Stack().empty() ? nullptr : Stack().back(); }

  // --- Streams; the null handle is the legacy stream of the current context ---
  std::shared_ptr<Stream> NewStream(Context* context, unsigned flags, int priority);
  std::shared_ptr<Stream> FindStream(CUstream handle);
  CUresult SynchronizeContext(Context* context);

  Handles<Stream> streams;
  Handles<Event> events;
  Handles<Module> modules;
  Handles<Function> functions;
  Handles<MemoryHandle> memories;

 private:
  Runtime();
  void Configure(const Settings& settings);
  bool Fires();
  bool IsInitialised();
  std::string Marker(const std::string& name) const { return settings_->node + "/" + name; }

  std::atomic<uint64_t> generation_{1};
  std::unique_ptr<Settings> settings_;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<MemoryMap> memory_;
  std::vector<int> visible_;
  bool is_target_ = true;  // of faults

  std::mutex mu_;
  std::map<std::string, uint64_t> calls_;           // guarded by mu_
  int initialised_in_ = 0;                          // process id; guarded by mu_
  std::map<int, Context*> primaries_;               // by device; guarded by mu_
  std::vector<std::unique_ptr<Context>> contexts_;  // all that ever were; guarded by mu_
  std::atomic<uint64_t> operations_{0};
  std::atomic<uint64_t> stream_numbers_{0};
  std::array<std::atomic<int>, 64> lost_ = {};  // error by device
};

// Handle -> object for a name that the API gives as `handle`.
inline std::string NameOf(const char* function) {
  std::string name = function;
  const size_t at = name.rfind("_v");
  if (at != std::string::npos && at + 3 == name.size()) name.resize(at);
  return name;
}

}  // namespace zeroshard::fake_cuda

#define FAKE_CUDA_ENTER(need)                                                            \
  do {                                                                                   \
    const CUresult entered = zeroshard::fake_cuda::Runtime::Get().Enter(__func__, need); \
    if (entered != CUDA_SUCCESS) return entered;                                         \
  } while (false)

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_RUNTIME_H_
