#include "tests/fakes/nccl/fake_communicator.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "tests/fakes/nccl/driver_door.h"
#include "tests/fakes/nccl/settings.h"

namespace zeroshard::fake_nccl {
namespace {

constexpr std::chrono::milliseconds kTick(1);
std::atomic<int> live = 0;

std::vector<FakeCudaRange> RangesOf(const Work& work) {
  std::vector<FakeCudaRange> ranges;
  for (const Transfer& send : work.sends) {
    ranges.push_back({send.address, send.head.bytes, 0, "what NCCL sends"});
  }
  for (const Transfer& receive : work.receives) {
    ranges.push_back({receive.address, receive.head.bytes, 1, "what NCCL receives"});
  }
  return ranges;
}

}  // namespace

int LiveCommunicators() { return live.load(); }

struct FakeCommunicator::Operation {
  std::shared_ptr<FakeCommunicator> communicator;
  Work work;
  uint64_t ticket = 0;
  bool hangs = false;
  bool fails = false;
};

FakeCommunicator::Use::Use(FakeCommunicator& communicator, const char* call)
    : communicator_(communicator) {
  if (communicator_.in_use_.exchange(true)) {
    Misuse(std::string(call) + " while another thread is in a call on the same communicator");
  }
}

FakeCommunicator::FakeCommunicator(std::string name, CUcontext context, PeerFacts own,
                                   Blocking blocking)
    : name_(std::move(name)), context_(context), own_(own), blocking_(blocking) {
  ++live;
}

FakeCommunicator::~FakeCommunicator() {
  JoinSetUp();
  --live;
}

void FakeCommunicator::JoinSetUp() {
  if (set_up_.joinable()) set_up_.join();
}

// Of a failure the state stays: streams fail at any time.
ncclResult_t FakeCommunicator::Enter(ncclResult_t next) {
  int before = next == ncclInProgress ? ncclSuccess : ncclInProgress;
  return state_.compare_exchange_strong(before, next) ? next : static_cast<ncclResult_t>(before);
}

void FakeCommunicator::Fail(ncclResult_t result, const std::string& why) {
  SetLastError(why);
  int expected = ncclSuccess;
  if (!state_.compare_exchange_strong(expected, result) && expected == ncclInProgress) {
    state_.store(result);
  }
}

bool FakeCommunicator::Stopped() const { return aborted_.load() || TheDriver().given_up() != 0; }

void FakeCommunicator::Stall() const {
  while (!Stopped()) std::this_thread::sleep_for(kTick);
}

void FakeCommunicator::Init() {
  state_.store(ncclInProgress);
  set_up_ = std::thread([this] { Connect(); });
  if (blocking()) JoinSetUp();
}

void FakeCommunicator::Connect() {
  const Settings settings = SettingsOf(own_.rank);
  if (settings.init_fails) return Fail(ncclSystemError, "init-fails is set");
  if (settings.init_hangs) {
    while (!aborted_.load()) std::this_thread::sleep_for(kTick);
    return;
  }
  Mesh mesh;
  const std::string problem = mesh.Connect(name_, own_, aborted_);
  if (aborted_.load()) return;
  if (!problem.empty()) return Fail(ncclInvalidUsage, problem);
  for (const PeerFacts& peer : mesh.facts()) {
    if (peer.rank == own_.rank || peer.device != own_.device) continue;
    return Fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(own_.rank) +
                                      " and rank " + std::to_string(peer.rank));
  }
  mesh_ = std::move(mesh);
  state_.store(ncclSuccess);
}

ncclResult_t FakeCommunicator::Split(int color, int key, Blocking blocking,
                                     std::function<void(std::shared_ptr<FakeCommunicator>)> adopt) {
  JoinSetUp();
  PeerFacts own = own_;
  own.color = color;
  own.key = key;
  state_.store(ncclInProgress);
  set_up_ = std::thread([this, number = splits_++, own, blocking, adopt = std::move(adopt)] {
    ConnectPart(number, own, blocking, adopt);
  });
  if (this->blocking()) JoinSetUp();
  return static_cast<ncclResult_t>(state_.load());
}

void FakeCommunicator::ConnectPart(
    int number, PeerFacts own, Blocking blocking,
    const std::function<void(std::shared_ptr<FakeCommunicator>)>& adopt) {
  const std::string name = name_ + "/" + std::to_string(number);
  Mesh mesh;
  const std::string problem = mesh.Connect(name, own, aborted_);
  if (aborted_.load()) return;
  if (!problem.empty()) return Fail(ncclInvalidUsage, problem);
  if (own.color == NCCL_SPLIT_NOCOLOR) {
    adopt(nullptr);
    state_.store(ncclSuccess);
    return;
  }
  const std::vector<PeerFacts>& facts = mesh.facts();
  std::vector<int> members;
  for (const PeerFacts& peer : facts) {
    if (peer.color == own.color) members.push_back(peer.rank);
  }
  std::stable_sort(members.begin(), members.end(), [&facts](int left, int right) {
    return facts[static_cast<size_t>(left)].key < facts[static_cast<size_t>(right)].key;
  });
  const auto self = std::find(members.begin(), members.end(), own.rank);
  own.rank = static_cast<int32_t>(self - members.begin());
  own.ranks = static_cast<int32_t>(members.size());
  auto part = std::make_shared<FakeCommunicator>(name + "." + std::to_string(own.color), context_,
                                                 own, blocking);
  part->mesh_ = std::move(mesh).Choose(members);
  adopt(std::move(part));
  state_.store(ncclSuccess);
}

ncclResult_t FakeCommunicator::CheckReady() const {
  const int state = state_.load();
  if (state == ncclSuccess && !finalized_) return ncclSuccess;
  SetLastError(
      state == ncclInProgress
          ? "Attempt to use communicator before the previous operation returned ncclSuccess"
          : "the communicator has failed or was finalized");
  return ncclInvalidArgument;
}

ncclResult_t FakeCommunicator::Submit(CUstream stream, Work work) {
  if (SettingsOf(own_.rank).fail_at == launches_ + 1) {
    Fail(ncclInternalError, "fail is set for this operation");
    return ncclInternalError;
  }
  CheckRegistrations();
  for (Transfer& send : work.sends) send.head.registered = IsRegistered(send) ? 1 : 0;
  for (Transfer& receive : work.receives) receive.head.registered = IsRegistered(receive) ? 1 : 0;
  pending_.emplace(stream, std::move(work));
  if (blocking()) return Launch();
  looks_ = 0;
  return Enter(ncclInProgress);
}

ncclResult_t FakeCommunicator::Poll() {
  if (pending_ && state_.load() == ncclInProgress && ++looks_ >= 2 &&
      SettingsOf(own_.rank).launch_hang_at != launches_ + 1) {
    Enter(ncclSuccess);
    if (const ncclResult_t result = Launch(); result != ncclSuccess) {
      Fail(result, "an operation did not come on its stream");
    }
  }
  if (finalized_ && state_.load() == ncclInProgress) {
    std::lock_guard lock(mu_);
    if (in_flight_ == 0) Enter(ncclSuccess);
  }
  return static_cast<ncclResult_t>(state_.load());
}

ncclResult_t FakeCommunicator::Launch() {
  auto [stream, work] = std::move(*pending_);
  pending_.reset();
  const Settings settings = SettingsOf(own_.rank);
  auto operation = std::make_unique<Operation>();
  operation->communicator = shared_from_this();
  operation->work = std::move(work);
  operation->ticket = launches_++;
  operation->hangs = settings.hang_at == launches_;
  operation->fails = settings.error_at == launches_;
  const std::vector<FakeCudaRange> ranges = RangesOf(operation->work);
  {
    std::lock_guard lock(mu_);
    ++in_flight_;
  }
  const auto run = [](void* user) {
    const std::unique_ptr<Operation> mine(static_cast<Operation*>(user));
    mine->communicator->Run(*mine);
    return CUDA_SUCCESS;
  };
  const auto drop = [](void* user) {
    const std::unique_ptr<Operation> mine(static_cast<Operation*>(user));
    mine->communicator->Finish();
  };
  const DriverDoor& driver = TheDriver();
  CUresult result = driver.ctx_push(context_);
  if (result == CUDA_SUCCESS) {
    result = driver.enqueue(stream, "NCCL", ranges.data(), static_cast<int>(ranges.size()), run,
                            drop, operation.get());
    CUcontext popped = nullptr;
    driver.ctx_pop(&popped);
  }
  if (result != CUDA_SUCCESS) {
    Finish();
    return ncclUnhandledCudaError;
  }
  operation.release();
  return ncclSuccess;
}

void FakeCommunicator::Run(const Operation& operation) {
  {
    std::unique_lock lock(mu_);
    while (turn_ != operation.ticket && !Stopped()) changed_.wait_for(lock, kTick);
    ++running_;
  }
  if (operation.fails) Fail(ncclSystemError, "error is set for this operation");
  if (operation.hangs || operation.fails) Stall();
  TransferWatch watch;
  watch.stop = [this] { return Stopped(); };
  watch.dead = [this](int peer) {
    if (!CurrentSettings().dead_peer_is_error) return;
    Fail(ncclRemoteError, "rank " + std::to_string(peer) + " has closed its connection");
  };
  if (!Stopped()) Move(operation.work, mesh_, own_.rank, watch);
  {
    std::lock_guard lock(mu_);
    --running_;
  }
  Finish();
}

void FakeCommunicator::Finish() {
  std::lock_guard lock(mu_);
  ++turn_;
  --in_flight_;
  changed_.notify_all();
}

ncclResult_t FakeCommunicator::Finalize() {
  if (const ncclResult_t ready = CheckReady(); ready != ncclSuccess) return ready;
  finalized_ = true;
  const ncclResult_t state = Enter(ncclInProgress);
  if (!blocking()) return state;
  while (Poll() == ncclInProgress) std::this_thread::sleep_for(kTick);
  return static_cast<ncclResult_t>(state_.load());
}

void FakeCommunicator::Abort() {
  CheckRegistrations();
  while (SettingsOf(own_.rank).abort_hangs) std::this_thread::sleep_for(kTick);
  aborted_.store(true);
  JoinSetUp();
  std::unique_lock lock(mu_);
  while (running_ != 0) changed_.wait_for(lock, kTick);
}

ncclResult_t FakeCommunicator::Register(void* buffer, size_t bytes, void** mark) {
  if (const ncclResult_t ready = CheckReady(); ready != ncclSuccess) return ready;
  *mark = nullptr;
  if (SettingsOf(own_.rank).registers_nothing) return ncclSuccess;
  if (buffer == nullptr || bytes == 0 || registrations_.count(buffer) != 0) {
    return ncclInvalidArgument;
  }
  if (!IsInOneMapping(reinterpret_cast<uint64_t>(buffer), bytes)) {
    Misuse("ncclCommRegister of memory that is not mapped, or not one allocation");
  }
  registrations_[buffer] = bytes;
  *mark = buffer;
  return ncclSuccess;
}

ncclResult_t FakeCommunicator::Deregister(void* mark) {
  if (mark == nullptr) return ncclSuccess;
  CheckRegistrations();
  if (registrations_.erase(mark) != 1) Misuse("ncclCommDeregister of an unknown handle");
  return ncclSuccess;
}

bool FakeCommunicator::IsRegistered(const Transfer& transfer) const {
  return std::any_of(registrations_.begin(), registrations_.end(), [&](const auto& one) {
    const auto begin = reinterpret_cast<uint64_t>(one.first);
    return begin <= transfer.address &&
           transfer.address + transfer.head.bytes <= begin + one.second;
  });
}

void FakeCommunicator::CheckRegistrations() const {
  for (const auto& [address, bytes] : registrations_) {
    if (IsInOneMapping(reinterpret_cast<uint64_t>(address), bytes)) continue;
    Misuse("memory was unmapped that is registered with a communicator");
  }
}

void FakeCommunicator::CheckNoRegistration(const char* call) const {
  if (!registrations_.empty()) Misuse(std::string(call) + " while memory is registered");
}

}  // namespace zeroshard::fake_nccl
