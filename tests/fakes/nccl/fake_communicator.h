// FakeCommunicator: what is behind an ncclComm_t of the fake.
//
// Creation and split run on a thread of their own. An operation of a communicator that does not
// block is "in progress" after ncclGroupEnd and comes on its stream at the second look at the
// asynchronous error, so that a caller who does not look, or does not wait, finds nothing done.
// Operations run in the order of their launches, whatever their streams are. Shared with those on
// streams, which outlive ncclCommAbort; an abort lets them end at once.
//
// Calls that NCCL does not allow side by side (all but the abort) end the process when two threads
// make them.
#ifndef ZEROSHARD_TESTS_FAKES_NCCL_FAKE_COMMUNICATOR_H_
#define ZEROSHARD_TESTS_FAKES_NCCL_FAKE_COMMUNICATOR_H_

#include <cuda.h>
#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "tests/fakes/nccl/mesh.h"
#include "tests/fakes/nccl/transfer.h"

namespace zeroshard::fake_nccl {

class FakeCommunicator : public std::enable_shared_from_this<FakeCommunicator> {
 public:
  enum class Blocking : uint8_t { kYes, kNo };

  // `context` is the device's.
  FakeCommunicator(std::string name, CUcontext context, PeerFacts own, Blocking blocking);
  ~FakeCommunicator();

  // ncclCommInitRankConfig.
  void Init();
  // ncclCommSplit; `adopt` is called with the part (null without a colour) before this one is
  // ready.
  ncclResult_t Split(int color, int key, Blocking blocking,
                     std::function<void(std::shared_ptr<FakeCommunicator>)> adopt);

  // At the end of a group.
  ncclResult_t Submit(CUstream stream, Work work);
  // ncclCommGetAsyncError.
  ncclResult_t Poll();
  // Success, or ncclInvalidArgument where something is in progress or failed.
  ncclResult_t CheckReady() const;
  ncclResult_t Finalize();
  // Waits for operations that run; those that have not begun will do nothing.
  void Abort();
  void JoinSetUp();

  ncclResult_t Register(void* buffer, size_t bytes, void** mark);
  ncclResult_t Deregister(void* mark);
  // Ends the process where registered memory was unmapped, or for `call` some is left.
  void CheckRegistrations() const;
  void CheckNoRegistration(const char* call) const;

  int rank() const { return own_.rank; }
  int ranks() const { return own_.ranks; }
  bool blocking() const { return blocking_ == Blocking::kYes; }

  // Two threads at once: the end of the process.
  class Use {
   public:
    Use(FakeCommunicator& communicator, const char* call);
    ~Use() { communicator_.in_use_.store(false); }

   private:
    FakeCommunicator& communicator_;
  };

 private:
  struct Operation;

  void Connect();
  void ConnectPart(int number, PeerFacts own, Blocking blocking,
                   const std::function<void(std::shared_ptr<FakeCommunicator>)>& adopt);
  ncclResult_t Enter(ncclResult_t next);
  void Fail(ncclResult_t result, const std::string& why);
  ncclResult_t Launch();
  void Run(const Operation& operation);
  void Finish();
  bool Stopped() const;
  void Stall() const;
  bool IsRegistered(const Transfer& transfer) const;

  const std::string name_;
  const CUcontext context_;
  const PeerFacts own_;
  const Blocking blocking_;
  std::atomic<int> state_ = ncclSuccess;
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> in_use_ = false;
  std::thread set_up_;
  Mesh mesh_;  // written by set_up_ before the state says so
  int splits_ = 0;
  uint64_t launches_ = 0;
  int looks_ = 0;
  bool finalized_ = false;
  std::optional<std::pair<CUstream, Work>> pending_;
  std::map<void*, size_t> registrations_;  // bytes by address

  std::mutex mu_;
  std::condition_variable changed_;
  uint64_t turn_ = 0;       // launches that are over
  uint64_t in_flight_ = 0;  // launches that are not
  int running_ = 0;
};

// How many live.
int LiveCommunicators();

}  // namespace zeroshard::fake_nccl

#endif  // ZEROSHARD_TESTS_FAKES_NCCL_FAKE_COMMUNICATOR_H_
