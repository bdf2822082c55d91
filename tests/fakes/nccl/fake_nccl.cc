// libnccl.so.2 of the tests: the functions of NCCL that ZeroShard calls, over Unix sockets and the
// streams of the fake driver.
#include "tests/fakes/nccl/fake_nccl.h"

#include <nccl.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/nccl/driver_door.h"
#include "tests/fakes/nccl/fake_communicator.h"
#include "tests/fakes/nccl/settings.h"

using zeroshard::fake_nccl::Count;
using zeroshard::fake_nccl::CurrentSettings;
using zeroshard::fake_nccl::FakeCommunicator;
using zeroshard::fake_nccl::Head;
using zeroshard::fake_nccl::Kind;
using zeroshard::fake_nccl::Misuse;
using zeroshard::fake_nccl::SetLastError;
using zeroshard::fake_nccl::Transfer;
using zeroshard::fake_nccl::Work;

struct ncclComm {
  std::shared_ptr<FakeCommunicator> fake;
};

namespace {

using Blocking = FakeCommunicator::Blocking;

constexpr uint64_t kSizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
constexpr unsigned kConfigMagic = 0xcafebeef;

// What a thread has called since ncclGroupStart.
struct OpenGroup {
  int depth = 0;
  ncclResult_t failure = ncclSuccess;
  struct Part {
    ncclComm* communicator;
    cudaStream_t stream;
    Work work;
  };
  std::vector<Part> parts;
};
thread_local OpenGroup group;

Work& WorkOf(ncclComm* communicator, cudaStream_t stream) {
  for (OpenGroup::Part& part : group.parts) {
    if (part.communicator != communicator) continue;
    if (part.stream != stream) Misuse("a group with several streams for one communicator");
    return part.work;
  }
  group.parts.push_back({communicator, stream, {}});
  return group.parts.back().work;
}

ncclResult_t CloseGroup() {
  if (group.depth == 0) Misuse("ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  OpenGroup closed = std::exchange(group, OpenGroup());
  if (closed.failure != ncclSuccess) return closed.failure;
  ncclResult_t result = ncclSuccess;
  for (OpenGroup::Part& part : closed.parts) {
    FakeCommunicator& fake = *part.communicator->fake;
    const FakeCommunicator::Use use(fake, "ncclGroupEnd");
    const ncclResult_t one = fake.Submit(part.stream, std::move(part.work));
    if (result == ncclSuccess || result == ncclInProgress)
      result = one == ncclSuccess ? result : one;
  }
  return result;
}

// One call of a collective or of send and receive: a group of its own outside of one.
template <class Fill>
ncclResult_t Operate(const char* name, ncclComm* communicator, cudaStream_t stream, Fill fill) {
  Count(name);
  ++group.depth;
  ncclResult_t result = ncclSuccess;
  {
    const FakeCommunicator::Use use(*communicator->fake, name);
    result = communicator->fake->CheckReady();
  }
  if (result == ncclSuccess) {
    fill(WorkOf(communicator, stream), *communicator->fake);
  } else {
    group.failure = result;
  }
  const ncclResult_t closed = CloseGroup();
  return result == ncclSuccess ? closed : result;
}

uint64_t Address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

Blocking BlockingOf(const ncclConfig_t* config) {
  return config != nullptr && config->blocking == 0 ? Blocking::kNo : Blocking::kYes;
}

}  // namespace

extern "C" {

void FakeNcclReset(const char* settings) { zeroshard::fake_nccl::SetSettings(settings); }

uint64_t FakeNcclCalls(const char* name) {
  if (std::strcmp(name, "communicators") == 0) {
    return static_cast<uint64_t>(zeroshard::fake_nccl::LiveCommunicators());
  }
  return zeroshard::fake_nccl::CountOf(name);
}

ncclResult_t ncclGetVersion(int* version) {
  *version = CurrentSettings().version;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::string name;
  for (int i = 0; i < 4; ++i) {
    const unsigned word = random();
    for (int shift = 0; shift < 32; shift += 4) name += "0123456789abcdef"[word >> shift & 15U];
  }
  *id = {};
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static constexpr const char* kTexts[ncclNumResults] = {
      "no error",
      "unhandled cuda error",
      "unhandled system error",
      "internal error",
      "invalid argument",
      "invalid usage",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) { return zeroshard::fake_nccl::LastError(); }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  Count("ncclCommInitRankConfig");
  *comm = nullptr;
  const bool given = config != nullptr;
  if (ranks < 1 || rank < 0 || rank >= ranks || (given && config->magic != kConfigMagic)) {
    SetLastError("Invalid rank or configuration");
    return ncclInvalidArgument;
  }
  const auto device = zeroshard::fake_nccl::DeviceOfThisThread();
  if (!device) {
    SetLastError("no current device");
    return ncclUnhandledCudaError;
  }
  id.internal[NCCL_UNIQUE_ID_BYTES - 1] = '\0';
  zeroshard::fake_nccl::PeerFacts own;
  own.rank = rank;
  own.ranks = ranks;
  own.device = device->uuid;
  *comm = new ncclComm{std::make_shared<FakeCommunicator>(std::string(id.internal), device->context,
                                                          own, BlockingOf(config))};
  (*comm)->fake->Init();
  return (*comm)->fake->Poll();
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  Count("ncclCommSplit");
  const FakeCommunicator::Use use(*comm->fake, "ncclCommSplit");
  *part = nullptr;
  if (const ncclResult_t ready = comm->fake->CheckReady(); ready != ncclSuccess) return ready;
  const bool blocks =
      config == nullptr ? comm->fake->blocking() : BlockingOf(config) == Blocking::kYes;
  return comm->fake->Split(color, key, blocks ? Blocking::kYes : Blocking::kNo,
                           [part](std::shared_ptr<FakeCommunicator> made) {
                             if (made != nullptr) *part = new ncclComm{std::move(made)};
                           });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const FakeCommunicator::Use use(*comm->fake, "ncclCommGetAsyncError");
  *error = comm->fake->Poll();
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Count("ncclCommFinalize");
  const FakeCommunicator::Use use(*comm->fake, "ncclCommFinalize");
  return comm->fake->Finalize();
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Count("ncclCommDestroy");
  if (comm->fake->Poll() == ncclInProgress) return ncclInvalidArgument;
  comm->fake->CheckNoRegistration("ncclCommDestroy");
  comm->fake->JoinSetUp();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Count("ncclCommAbort");
  comm->fake->Abort();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void* buffer, size_t bytes, void** mark) {
  Count("ncclCommRegister");
  const FakeCommunicator::Use use(*comm->fake, "ncclCommRegister");
  return comm->fake->Register(buffer, bytes, mark);
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* mark) {
  Count("ncclCommDeregister");
  const FakeCommunicator::Use use(*comm->fake, "ncclCommDeregister");
  return comm->fake->Deregister(mark);
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  Count("ncclGroupEnd");
  return CloseGroup();
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Operate("ncclAllGather", comm, stream, [&](Work& work, FakeCommunicator& fake) {
    const Head head = {Kind::kAllGather, 0, count * kSizes[type]};
    if (head.bytes == 0) return;
    for (int peer = 0; peer < fake.ranks(); ++peer) {
      work.sends.push_back({peer, head, Address(send)});
      work.receives.push_back(
          {peer, head, Address(receive) + static_cast<uint64_t>(peer) * head.bytes});
    }
  });
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return Operate("ncclBroadcast", comm, stream, [&](Work& work, FakeCommunicator& fake) {
    const Head head = {Kind::kBroadcast, root, count * kSizes[type]};
    if (head.bytes == 0) return;
    work.receives.push_back({root, head, Address(receive)});
    if (root != fake.rank()) return;
    for (int peer = 0; peer < fake.ranks(); ++peer) {
      work.sends.push_back({peer, head, Address(send)});
    }
  });
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return Operate("ncclSend", comm, stream, [&](Work& work, FakeCommunicator&) {
    const Head head = {Kind::kMessage, 0, count * kSizes[type]};
    if (head.bytes != 0) work.sends.push_back({peer, head, Address(send)});
  });
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Operate("ncclRecv", comm, stream, [&](Work& work, FakeCommunicator&) {
    const Head head = {Kind::kMessage, 0, count * kSizes[type]};
    if (head.bytes != 0) work.receives.push_back({peer, head, Address(receive)});
  });
}

}  // extern "C"
