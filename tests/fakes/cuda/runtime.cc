#include "tests/fakes/cuda/runtime.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

namespace zeroshard::fake_cuda {
namespace {

// Errors of the hardware, which all processes see until it is repaired; others are of a context.
bool IsOfDevice(CUresult error) {
  return error == CUDA_ERROR_ECC_UNCORRECTABLE || error == CUDA_ERROR_DEVICE_UNAVAILABLE;
}

bool CommandLineHas(const std::string& text) {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string line((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return line.find(text) != std::string::npos;
}

// CUDA_VISIBLE_DEVICES: a list of ordinals; it ends at the first one that is none.
std::vector<int> VisibleDevices(int devices) {
  std::vector<int> visible;
  const char* const text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int device = 0; device < devices; ++device) visible.push_back(device);
    return visible;
  }
  std::istringstream list(text);
  std::string item;
  while (std::getline(list, item, ',')) {
    char* end = nullptr;
    const long device = std::strtol(item.c_str(), &end, 10);
    if (item.empty() || *end != '\0' || device < 0 || device >= devices) break;
    visible.push_back(static_cast<int>(device));
  }
  return visible;
}

}  // namespace

Runtime& Runtime::Get() {
  static auto* const runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime() { Configure(SettingsFromEnvironment()); }

void Runtime::Configure(const Settings& settings) {
  settings_ = std::make_unique<Settings>(settings);
  memory_ = std::make_unique<MemoryMap>();
  pool_ = std::make_unique<Pool>(settings);
  visible_ = VisibleDevices(settings.devices);
  is_target_ = settings.only.empty() || CommandLineHas(settings.only);
  operations_ = 0;
  for (std::atomic<int>& error : lost_) error = CUDA_SUCCESS;
}

void Runtime::Reset(const Settings& settings) {
  ++generation_;
  std::vector<std::shared_ptr<Stream>> running;  // also those that were destroyed with work left
  std::lock_guard<std::mutex> lock(mu_);
  for (const std::unique_ptr<Context>& context : contexts_) {
    std::lock_guard<std::mutex> order(context->order_mu);
    context->destroyed = true;
    if (context->legacy != nullptr) running.push_back(std::exchange(context->legacy, nullptr));
    for (const std::weak_ptr<Stream>& weak : context->streams) {
      std::shared_ptr<Stream> stream = weak.lock();
      if (stream != nullptr) running.push_back(std::move(stream));
    }
  }
  for (const std::shared_ptr<Stream>& stream : running) {
    const std::shared_ptr<Completion> last = stream->Last();
    if (last != nullptr) last->Wait();
    stream->Close();
    streams.Remove(stream.get());
  }
  for (const auto& event : events.All()) events.Remove(event.get());
  for (const auto& handle : memories.All()) memories.Remove(handle.get());
  for (const auto& function : functions.All()) functions.Remove(function.get());
  for (const auto& module : modules.All()) modules.Remove(module.get());
  Stack().clear();
  primaries_.clear();
  calls_.clear();
  initialised_in_ = 0;
  Configure(settings);
}

bool Runtime::Fires() {
  if (!is_target_) return false;
  if (!settings_->once || settings_->node.empty()) return true;
  const Fd marker(open(Marker("fired").c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  return marker.valid();
}

bool Runtime::IsInitialised() {
  std::lock_guard<std::mutex> lock(mu_);
  return initialised_in_ == getpid();
}

CUresult Runtime::Enter(const char* function, Need need) {
  if (Stream::InCallback()) return CUDA_ERROR_NOT_PERMITTED;
  const std::string name = NameOf(function);
  uint64_t call = 0;
  {
    std::lock_guard<std::mutex> lock(mu_);
    call = ++calls_[name];
  }
  for (const Fault& fault : settings_->faults) {
    if (fault.at == call && fault.api == name && Fires()) return fault.error;
  }
  if (need == Need::kNothing) return CUDA_SUCCESS;
  if (!IsInitialised()) return CUDA_ERROR_NOT_INITIALIZED;
  if (need == Need::kInit) return CUDA_SUCCESS;
  Context* const context = Current();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (context->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return LostError(context->device);
}

CUresult Runtime::Init() {
  if (visible_.empty()) return CUDA_ERROR_NO_DEVICE;
  std::lock_guard<std::mutex> lock(mu_);
  // A child made by fork has the parent's state, which no driver supports.
  if (initialised_in_ != 0 && initialised_in_ != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  initialised_in_ = getpid();
  return CUDA_SUCCESS;
}

uint64_t Runtime::Calls(const std::string& api) {
  if (api == "operations") return operations_;
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = calls_.find(api);
  return it == calls_.end() ? 0 : it->second;
}

void Runtime::Count(const std::string& what) {
  std::lock_guard<std::mutex> lock(mu_);
  ++calls_[what];
}

CUdevice Runtime::OrdinalOf(int device) const {
  for (size_t i = 0; i < visible_.size(); ++i) {
    if (visible_[i] == device) return static_cast<CUdevice>(i);
  }
  return -1;
}

CUresult Runtime::LostError(int device) {
  std::atomic<int>& lost = lost_[static_cast<size_t>(device)];
  if (lost != CUDA_SUCCESS || settings_->node.empty()) return static_cast<CUresult>(lost.load());
  const std::string marker = Marker("lost-" + std::to_string(device));
  if (access(marker.c_str(), F_OK) != 0) return CUDA_SUCCESS;
  int error = CUDA_ERROR_ECC_UNCORRECTABLE;
  std::ifstream(marker) >> error;
  lost = error;
  return static_cast<CUresult>(error);
}

void Runtime::Lose(int device, CUresult error) {
  int none = CUDA_SUCCESS;
  if (!lost_[static_cast<size_t>(device)].compare_exchange_strong(none, error)) return;
  if (settings_->node.empty() || !IsOfDevice(error)) return;
  std::ofstream(Marker("lost-" + std::to_string(device))) << static_cast<int>(error);
}

OperationFate Runtime::CountOperation(int device) {
  const uint64_t operation = ++operations_;
  if (operation == settings_->lost_at && Fires()) Lose(device, settings_->lost_error);
  if (operation == settings_->hang_at && Fires()) return OperationFate::kHangs;
  return OperationFate::kRuns;
}

Context* Runtime::NewContext(CUdevice ordinal, unsigned flags) {
  auto context = std::make_unique<Context>();
  context->device = DeviceOf(ordinal);
  context->flags = flags;
  context->retained = 1;
  std::lock_guard<std::mutex> lock(mu_);
  contexts_.push_back(std::move(context));
  return contexts_.back().get();
}

Context* Runtime::RetainPrimary(CUdevice ordinal) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto it = primaries_.find(DeviceOf(ordinal));
    if (it != primaries_.end()) {
      ++it->second->retained;
      return it->second;
    }
  }
  Context* const context = NewContext(ordinal, 0);
  std::lock_guard<std::mutex> lock(mu_);
  context->primary = true;
  primaries_[context->device] = context;
  return context;
}

Context* Runtime::PrimaryOf(CUdevice ordinal) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = primaries_.find(DeviceOf(ordinal));
  return it == primaries_.end() ? nullptr : it->second;
}

CUresult Runtime::ReleasePrimary(CUdevice ordinal) {
  Context* context = nullptr;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto it = primaries_.find(DeviceOf(ordinal));
    if (it == primaries_.end()) return CUDA_ERROR_INVALID_CONTEXT;
    if (--it->second->retained > 0) return CUDA_SUCCESS;
    context = it->second;
    primaries_.erase(it);
  }
  DestroyContext(context);
  return CUDA_SUCCESS;
}

bool Runtime::IsContext(Context* context) {
  std::lock_guard<std::mutex> lock(mu_);
  for (const std::unique_ptr<Context>& known : contexts_) {
    if (known.get() == context) return true;
  }
  return false;
}

// Work that was queued ends by itself; handles of the context's streams and events become invalid.
void Runtime::DestroyContext(Context* context) {
  std::shared_ptr<Stream> legacy;
  {
    std::lock_guard<std::mutex> order(context->order_mu);
    legacy = std::exchange(context->legacy, nullptr);
  }
  if (legacy != nullptr) legacy->Close();
  for (const std::shared_ptr<Stream>& stream : streams.All()) {
    if (stream->context() != context) continue;
    streams.Remove(stream.get());
    stream->Close();
  }
  for (const std::shared_ptr<Event>& event : events.All()) {
    if (event->context == context) events.Remove(event.get());
  }
  std::lock_guard<std::mutex> lock(mu_);
  context->destroyed = true;
}

std::vector<Context*>& Runtime::Stack() {
  thread_local std::vector<Context*> stack;
  return stack;
}

std::shared_ptr<Stream> Runtime::NewStream(Context* context, unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>(context, flags, priority, ++stream_numbers_);
  stream->Start();
  streams.Add<CUstream>(stream);
  std::lock_guard<std::mutex> order(context->order_mu);
  std::erase_if(context->streams, [](const std::weak_ptr<Stream>& old) { return old.expired(); });
  context->streams.push_back(stream);
  return stream;
}

std::shared_ptr<Stream> Runtime::FindStream(CUstream handle) {
  Context* const context = Current();
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    if (context == nullptr) return nullptr;
    std::lock_guard<std::mutex> order(context->order_mu);
    if (context->legacy == nullptr) {
      context->legacy = std::make_shared<Stream>(context, 0, 0, 0);
      context->legacy->Start();
      context->streams.push_back(context->legacy);
    }
    return context->legacy;
  }
  if (handle != CU_STREAM_PER_THREAD) return streams.Find(handle);
  thread_local std::map<Context*, std::weak_ptr<Stream>> of_thread;
  if (context == nullptr) return nullptr;
  std::shared_ptr<Stream> stream = of_thread[context].lock();
  if (stream == nullptr) of_thread[context] = stream = NewStream(context, 0, 0);
  return stream;
}

CUresult Runtime::SynchronizeContext(Context* context) {
  std::vector<std::shared_ptr<Stream>> waited;
  {
    std::lock_guard<std::mutex> order(context->order_mu);
    if (context->legacy != nullptr) waited.push_back(context->legacy);
    for (const std::weak_ptr<Stream>& weak : context->streams) {
      std::shared_ptr<Stream> stream = weak.lock();
      if (stream != nullptr) waited.push_back(std::move(stream));
    }
  }
  for (const std::shared_ptr<Stream>& stream : waited) {
    const std::shared_ptr<Completion> last = stream->Last();
    if (last != nullptr) last->Wait();
  }
  return LostError(context->device);
}

}  // namespace zeroshard::fake_cuda
