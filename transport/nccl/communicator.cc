#include "transport/nccl/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/status.h"
#include "transport/nccl/api.h"
#include "transport/nccl/handle.h"

namespace zeroshard {
namespace {

// Bytes are moved, whatever they mean.
constexpr ncclDataType_t kBytes = ncclUint8;

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Calls until the first that fails, which decides; the group is closed in any case.
class Group {
 public:
  explicit Group(const NcclApi& api) : api_(api), result_(api.GroupStart()) {
    open_ = result_ == ncclSuccess;
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void Add(ncclResult_t result) {
    if (Good() && result != ncclInProgress) result_ = result;
  }
  bool Good() const { return result_ == ncclSuccess; }

  ncclResult_t End() {
    if (!open_) return result_;
    const ncclResult_t end = api_.GroupEnd();
    return Good() ? end : result_;
  }

 private:
  const NcclApi& api_;
  ncclResult_t result_;
  bool open_ = false;
};

// Pieces of one size, one after the other, as ncclAllGather places them.
bool IsEven(const NcclGather& gather) {
  for (size_t rank = 0; rank < gather.receive.size(); ++rank) {
    const NcclBuffer& piece = gather.receive[rank];
    if (piece.bytes != gather.send.bytes) return false;
    if (piece.address != gather.receive[0].address + rank * gather.send.bytes) return false;
  }
  return true;
}

void AddGather(const NcclApi& api, const NcclGather& gather, uint32_t rank, ncclComm_t comm,
               CUstream_st* stream, Group& group) {
  if (IsEven(gather)) {
    if (gather.send.bytes == 0) return;
    group.Add(api.AllGather(Pointer(gather.send.address), Pointer(gather.receive[0].address),
                            gather.send.bytes, kBytes, comm, stream));
    return;
  }
  for (uint32_t root = 0; root < gather.receive.size() && group.Good(); ++root) {
    const NcclBuffer& piece = gather.receive[root];
    if (piece.bytes == 0) continue;
    const uint64_t source = root == rank ? gather.send.address : piece.address;
    group.Add(api.Broadcast(Pointer(source), Pointer(piece.address), piece.bytes, kBytes,
                            static_cast<int>(root), comm, stream));
  }
}

std::string Who(uint32_t rank, uint32_t ranks, const std::string& name) {
  return absl::StrCat("rank ", rank, " of ", ranks, " of ", name);
}

uint64_t TotalBytes(std::span<const NcclMessage> messages) {
  uint64_t bytes = 0;
  for (const NcclMessage& message : messages) bytes += message.buffer.bytes;
  return bytes;
}

}  // namespace

// The right to put an operation on a stream; one thread has it at a time.
class NcclCommunicator::Issue {
 public:
  explicit Issue(NcclCommunicator& communicator)
      : communicator_(communicator), mine_(!communicator.issuing_.exchange(true)) {}
  ~Issue() {
    if (mine_) communicator_.issuing_.store(false);
  }
  Issue(const Issue&) = delete;
  Issue& operator=(const Issue&) = delete;

  absl::Status Check() const {
    if (mine_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL, ", communicator_.handle_->who(),
                     ": two threads put operations on streams at the same time; one thread a "
                     "device does"));
  }

  // Runs the calls as one group, and waits until NCCL has put it on the stream.
  absl::Status Run(const std::string& kind, uint64_t bytes,
                   const std::function<void(ncclComm_t, Group&)>& calls) {
    const uint64_t number = communicator_.operations_.fetch_add(1) + 1;
    const std::string what = absl::StrCat(kind, ", operation ", number, ", ", bytes, " bytes");
    NcclHandle& handle = *communicator_.handle_;
    ZS_RETURN_IF_ERROR(handle.Call(what, [&](ncclComm_t& comm) {
      Group group(handle.library().api());
      calls(comm, group);
      return group.End();
    }));
    return handle.Settle(absl::StrCat("the launch of ", what), communicator_.options_.timeout);
  }

 private:
  NcclCommunicator& communicator_;
  const bool mine_;
};

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclHandle> handle, uint32_t rank,
                                   uint32_t ranks, const NcclOptions& options)
    : rank_(rank), ranks_(ranks), options_(options), handle_(std::move(handle)) {}

NcclCommunicator::~NcclCommunicator() { Abort(options_.abort_timeout); }

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(
    const NcclLibrary& library, const NcclUniqueId& id, uint32_t rank, uint32_t ranks,
    const NcclOptions& options) {
  if (rank >= ranks) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of a communicator of ", ranks));
  }
  if (const std::string blocks = Env("NCCL_COMM_BLOCKING").value_or("0"); blocks != "0") {
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL_COMM_BLOCKING is ", blocks,
                     " in the environment, expected is 0 or nothing: "
                     "NCCL would block, and a rank that dies would hang the others"));
  }
  auto name = std::make_shared<const std::string>(options.name);
  auto handle = std::make_shared<NcclHandle>(library, options, name, Who(rank, ranks, *name));
  std::unique_ptr<NcclCommunicator> made(new NcclCommunicator(handle, rank, ranks, options));
  ncclUniqueId unique = {};
  std::memcpy(unique.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.commName = name->c_str();
  const std::string what = "its creation";
  ZS_RETURN_IF_ERROR(handle->Call(what, [&](ncclComm_t& comm) {
    return library.api().CommInitRankConfig(&comm, static_cast<int>(ranks), unique,
                                            static_cast<int>(rank), &config);
  }));
  ZS_RETURN_IF_ERROR(handle->Settle(what, options.timeout));
  handle->SetMade();
  return made;
}

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Split(
    std::span<const uint32_t> color_of_rank) {
  Issue issue(*this);
  ZS_RETURN_IF_ERROR(issue.Check());
  const NcclLibrary& library = handle_->library();
  if (color_of_rank.size() != ranks_) {
    return absl::InvalidArgumentError(
        absl::StrCat("colours of ", color_of_rank.size(), " ranks for a communicator of ", ranks_));
  }
  if (!library.can_split()) {
    return absl::FailedPreconditionError(
        absl::StrCat(library.description(), " cannot split communicators: 2.18 or newer can"));
  }
  const uint32_t color = color_of_rank[rank_];
  const auto before = color_of_rank.subspan(0, rank_);
  const auto part_rank = static_cast<uint32_t>(std::count(before.begin(), before.end(), color));
  const auto part_ranks =
      static_cast<uint32_t>(std::count(color_of_rank.begin(), color_of_rank.end(), color));
  NcclOptions options = options_;
  options.name = absl::StrCat(options_.name, " part ", color);
  auto name = std::make_shared<const std::string>(options.name);
  ZS_ASSIGN_OR_RETURN(
      ncclComm_t comm,
      handle_->Split(static_cast<int>(color), static_cast<int>(rank_), name, options_.timeout));
  auto part =
      std::make_shared<NcclHandle>(library, options, name, Who(part_rank, part_ranks, *name), comm);
  std::unique_ptr<NcclCommunicator> made(
      new NcclCommunicator(part, part_rank, part_ranks, options));
  ZS_RETURN_IF_ERROR(part->Settle("a split", options_.timeout));
  part->SetMade();
  return made;
}

absl::Status NcclCommunicator::AllGather(CUstream_st* stream, std::span<const NcclGather> gathers) {
  Issue issue(*this);
  ZS_RETURN_IF_ERROR(issue.Check());
  uint64_t bytes = 0;
  for (const NcclGather& gather : gathers) {
    if (gather.receive.size() != ranks_ || gather.receive[rank_].bytes != gather.send.bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("NCCL, ", handle_->who(), ": an all-gather has ", gather.receive.size(),
                       " pieces for ", ranks_, " ranks, or its own of another size than the ",
                       gather.send.bytes, " bytes that it sends"));
    }
    for (const NcclBuffer& piece : gather.receive) bytes += piece.bytes;
  }
  return issue.Run("all-gather", bytes, [&](ncclComm_t comm, Group& group) {
    const NcclApi& api = handle_->library().api();
    for (const NcclGather& gather : gathers) AddGather(api, gather, rank_, comm, stream, group);
  });
}

absl::Status NcclCommunicator::CheckMessages(std::span<const NcclMessage> messages) const {
  for (const NcclMessage& message : messages) {
    if (message.peer >= ranks_) {
      return absl::InvalidArgumentError(
          absl::StrCat("NCCL, ", handle_->who(), ": a message for rank ", message.peer));
    }
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Exchange(CUstream_st* stream, std::span<const NcclBuffer> sends,
                                        std::span<const NcclBuffer> receives) {
  if (sends.size() != ranks_ || receives.size() != ranks_) {
    return absl::InvalidArgumentError(absl::StrCat("NCCL, ", handle_->who(), ": an exchange of ",
                                                   sends.size(), " and ", receives.size(),
                                                   " buffers"));
  }
  std::vector<NcclMessage> out(ranks_);
  std::vector<NcclMessage> in(ranks_);
  for (uint32_t peer = 0; peer < ranks_; ++peer) {
    out[peer] = {peer, sends[peer]};
    in[peer] = {peer, receives[peer]};
  }
  return Exchange(stream, std::span<const NcclMessage>(out), std::span<const NcclMessage>(in));
}

absl::Status NcclCommunicator::Exchange(CUstream_st* stream, std::span<const NcclMessage> sends,
                                        std::span<const NcclMessage> receives) {
  Issue issue(*this);
  ZS_RETURN_IF_ERROR(issue.Check());
  ZS_RETURN_IF_ERROR(CheckMessages(sends));
  ZS_RETURN_IF_ERROR(CheckMessages(receives));
  const uint64_t bytes = TotalBytes(sends) + TotalBytes(receives);
  return issue.Run("exchange", bytes, [&](ncclComm_t comm, Group& group) {
    const NcclApi& api = handle_->library().api();
    for (const auto& [peer, buffer] : sends) {
      if (buffer.bytes == 0 || !group.Good()) continue;
      group.Add(api.Send(Pointer(buffer.address), buffer.bytes, kBytes, static_cast<int>(peer),
                         comm, stream));
    }
    for (const auto& [peer, buffer] : receives) {
      if (buffer.bytes == 0 || !group.Good()) continue;
      group.Add(api.Recv(Pointer(buffer.address), buffer.bytes, kBytes, static_cast<int>(peer),
                         comm, stream));
    }
  });
}

absl::Status NcclCommunicator::Broadcast(CUstream_st* stream,
                                         std::span<const NcclBroadcast> broadcasts) {
  Issue issue(*this);
  ZS_RETURN_IF_ERROR(issue.Check());
  uint64_t bytes = 0;
  for (const NcclBroadcast& item : broadcasts) {
    if (item.root >= ranks_ || (item.root == rank_ && item.send.bytes != item.receive.bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("NCCL, ", handle_->who(), ": a broadcast from rank ", item.root, " of ",
                       item.send.bytes, " bytes into ", item.receive.bytes));
    }
    bytes += item.receive.bytes;
  }
  return issue.Run("broadcast", bytes, [&](ncclComm_t comm, Group& group) {
    const NcclApi& api = handle_->library().api();
    for (const NcclBroadcast& item : broadcasts) {
      if (item.receive.bytes == 0 || !group.Good()) continue;
      const NcclBuffer& source = item.root == rank_ ? item.send : item.receive;
      group.Add(api.Broadcast(Pointer(source.address), Pointer(item.receive.address),
                              item.receive.bytes, kBytes, static_cast<int>(item.root), comm,
                              stream));
    }
  });
}

bool NcclCommunicator::registers() const { return handle_->library().can_register(); }

absl::Status NcclCommunicator::Register(const NcclBuffer& buffer) {
  Issue issue(*this);
  ZS_RETURN_IF_ERROR(issue.Check());
  const NcclLibrary& library = handle_->library();
  if (!library.can_register() || buffer.bytes == 0) return absl::OkStatus();
  if (registrations_.count(buffer.address) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL, ", handle_->who(), ": this memory is registered already"));
  }
  void* registration = nullptr;
  ZS_RETURN_IF_ERROR(handle_->Call("a registration", [&](ncclComm_t& comm) {
    return library.api().CommRegister(comm, Pointer(buffer.address), buffer.bytes, &registration);
  }));
  registrations_[buffer.address] = registration;
  return handle_->Settle("a registration", options_.timeout);
}

absl::Status NcclCommunicator::Unregister(const NcclBuffer& buffer) {
  Issue issue(*this);
  ZS_RETURN_IF_ERROR(issue.Check());
  const auto found = registrations_.find(buffer.address);
  if (found == registrations_.end()) return absl::OkStatus();
  void* const registration = found->second;
  registrations_.erase(found);
  ZS_RETURN_IF_ERROR(handle_->Call("the end of a registration", [&](ncclComm_t& comm) {
    return handle_->library().api().CommDeregister(comm, registration);
  }));
  return handle_->Settle("the end of a registration", options_.timeout);
}

absl::Status NcclCommunicator::Poll() { return handle_->Ready("an operation").status(); }

absl::Status NcclCommunicator::Synchronize(const std::function<absl::StatusOr<bool>()>& done,
                                           absl::Duration timeout) {
  const Deadline deadline = Deadline::After(timeout);
  Backoff backoff;
  for (;;) {
    absl::StatusOr<bool> finished = done();
    if (!finished.ok()) return handle_->Fail(Annotate(finished.status(), handle_->who()));
    ZS_RETURN_IF_ERROR(Poll());
    if (*finished) return absl::OkStatus();
    ZS_RETURN_IF_ERROR(handle_->CheckAlive());
    if (deadline.Passed()) {
      return handle_->Fail(absl::DeadlineExceededError(
          absl::StrCat("NCCL, ", handle_->who(), ": what was put on the stream (", operations(),
                       " operations so far) was not over within ", absl::FormatDuration(timeout),
                       ": a rank is dead, late, or does other operations")));
    }
    backoff.Wait();
  }
}

void NcclCommunicator::Interrupt(const absl::Status& reason) {
  handle_->Fail(reason).IgnoreError();
}

void NcclCommunicator::BeginAbort() { handle_->Abort(absl::ZeroDuration()); }

bool NcclCommunicator::Abort(absl::Duration timeout) {
  const bool ended = handle_->Abort(timeout);
  if (!ended) {
    LogError(absl::StrCat("NCCL, ", handle_->who(), ": its abort has not ended within ",
                          absl::FormatDuration(timeout),
                          "; the communicator and its thread are given up"));
  }
  return ended;
}

absl::Status NcclCommunicator::Close() {
  Issue issue(*this);
  ZS_RETURN_IF_ERROR(issue.Check());
  const NcclApi& api = handle_->library().api();
  absl::Status status = handle_->failure();
  for (const auto& [address, registration] : registrations_) {
    if (!status.ok()) break;
    status = handle_->Call("the end of a registration", [&, mark = registration](ncclComm_t& comm) {
      return api.CommDeregister(comm, mark);
    });
  }
  registrations_.clear();
  if (status.ok()) {
    status = handle_->Call("its end", [&](ncclComm_t& comm) { return api.CommFinalize(comm); });
  }
  if (status.ok()) status = handle_->Settle("its end", options_.timeout);
  if (status.ok()) {
    status = handle_->Call("its end", [&](ncclComm_t& comm) { return api.CommDestroy(comm); });
  }
  if (status.ok()) handle_->Forget();
  Abort(options_.abort_timeout);
  return status;
}

}  // namespace zeroshard
