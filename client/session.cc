#include "client/session.h"

#include <algorithm>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "client/attach.h"
#include "client/fork_guard.h"
#include "client/request_channel.h"
#include "client/session_impl.h"

namespace zeroshard {
namespace {

using trainer::v1::SessionRequest;

// Beyond the time after which the worker itself names a missing rank.
constexpr absl::Duration kTimeoutSlack = absl::Seconds(15);
// Drives that move less a second are waited for no longer than this says.
constexpr uint64_t kSlowestDrive = 20'000'000;

// How long a step may take that reads and writes the states that rest on drives. Workers that are
// stuck are found by the server, so this is the last resort.
absl::Duration TimeOnDrives(std::span<const LedgerEntry> ledger) {
  uint64_t bytes = 0;
  for (const LedgerEntry& line : ledger) {
    if (line.tier == "nvme") bytes += 2 * line.bytes;
  }
  return absl::Seconds(bytes / kSlowestDrive);
}

}  // namespace

absl::Status Session::Impl::Open(std::function<bool()> interrupted) {
  const trainer::v1::AttachReply& reply = attachment.reply;
  for (const auto& line : reply.ledger()) {
    ledger.push_back({line.state(), line.tier(), line.holder(), line.bytes(), line.formula_bytes(),
                      line.formula()});
  }
  const absl::Duration timeout = absl::Milliseconds(reply.config().collective_timeout_ms()) +
                                 kTimeoutSlack + TimeOnDrives(ledger);
  Stream::Options options{.socket = reply.worker_socket(),
                          .token = reply.token(),
                          .rank = rank,
                          .generation = reply.generation(),
                          .patience = timeout};
  ZS_ASSIGN_OR_RETURN(channel,
                      RequestChannel::Open(*attachment.rank_page.As<RankPage>(), std::move(options),
                                           timeout, std::move(interrupted)));
  const trainer::v1::HelloReply& hello = channel->hello();
  state = {.step = hello.step(),
           .attempt = hello.attempt(),
           .updates = hello.updates(),
           .loss_scale = hello.loss_scale(),
           .user_state = hello.user_state(),
           .initialized = hello.initialized(),
           .resumed = reply.resumed()};
  return absl::OkStatus();
}

absl::Status Session::Impl::CheckHere() const {
  if (ForkGeneration() == fork_generation) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this process was forked from a trainer: it has no session (attach in the process that "
      "trains, or start the child with \"spawn\")");
}

absl::Status Session::Impl::CheckUnit(uint32_t unit) const {
  if (unit < attachment.layout.units().size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there is no unit ", unit, ": the job has ", attachment.layout.units().size()));
}

template <typename Units>
absl::Status Session::Impl::SetUnits(std::span<const uint32_t> units, Units* target) const {
  if (units.empty()) return absl::InvalidArgumentError("a gather or release names no unit");
  for (const uint32_t unit : units) {
    ZS_RETURN_IF_ERROR(CheckUnit(unit));
    target->Add(unit);
  }
  return absl::OkStatus();
}

absl::StatusOr<RequestId> Session::Impl::SubmitUsingSlot(SessionRequest request, uint64_t offset,
                                                         uint64_t bytes) {
  return channel->Submit(std::move(request), [this, offset, bytes](uint64_t id) {
    absl::MutexLock lock(&mu);
    return slots.Bind(offset, bytes, id);
  });
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session::~Session() {
  // In a forked child the threads of the session do not exist and its locks may be held for ever.
  if (!impl_->CheckHere().ok()) static_cast<void>(impl_.release());
}

absl::StatusOr<std::unique_ptr<Session>> Session::Attach(AttachOptions options) {
  std::function<bool()> interrupted = options.interrupted;
  DaemonClient daemon(options.socket, interrupted);
  ZS_ASSIGN_OR_RETURN(Attachment attachment, AttachRank(daemon, options));
  ZS_FAULT_POINT("client.attach.before_hello");
  auto impl = std::make_unique<Impl>(options, std::move(daemon), std::move(attachment));
  ZS_RETURN_IF_ERROR(impl->Open(std::move(interrupted)));
  ZS_RETURN_IF_ERROR(impl->OpenDevice(options));
  ZS_FAULT_POINT("client.attach.after_hello");
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

// --- What the session knows ---------------------------------------------------------------------

const Layout& Session::layout() const { return impl_->attachment.layout; }
const model::v1::EngineConfig& Session::config() const { return impl_->attachment.reply.config(); }
const SessionState& Session::state() const { return impl_->state; }
const std::vector<std::string>& Session::warnings() const { return impl_->warnings; }
const std::vector<LedgerEntry>& Session::ledger() const { return impl_->ledger; }
const std::string& Session::scheduler() const { return impl_->attachment.reply.scheduler(); }
uint64_t Session::generation() const { return impl_->attachment.reply.generation(); }
uint32_t Session::rank() const { return impl_->rank; }
uint32_t Session::world_size() const { return impl_->world_size; }

std::span<const std::byte> Session::parameter_window() const {
  if (!impl_->CheckHere().ok()) return {};
  return impl_->attachment.parameter_window.bytes();
}

std::span<std::byte> Session::gradient_window() const {
  if (!impl_->CheckHere().ok()) return {};
  return impl_->attachment.gradient_window->bytes();
}

StepResult Session::step_result() const { return impl_->Result(); }

StepResult Session::Impl::Result() {
  absl::MutexLock lock(&mu);
  if (CheckHere().ok()) channel->completions().ReadStepResult(last_result);
  return last_result;
}

uint64_t Session::parameter_epoch() const {
  return impl_->CheckHere().ok() ? impl_->channel->completions().epoch() : 0;
}

// --- Slots --------------------------------------------------------------------------------------

absl::StatusOr<uint64_t> Session::AcquireSlot(uint64_t bytes) {
  return AcquireSlot(bytes, impl_->channel->timeout());
}

absl::StatusOr<uint64_t> Session::AcquireSlot(uint64_t bytes, absl::Duration timeout) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  std::optional<uint64_t> offset;
  uint64_t capacity = 0;
  const auto try_acquire = [&] {
    absl::MutexLock lock(&impl_->mu);
    capacity = impl_->slots.capacity();
    offset = impl_->slots.Acquire(bytes);
    if (offset) return true;
    impl_->slots.Reclaim([this](uint64_t id) { return impl_->channel->Done(id); });
    offset = impl_->slots.Acquire(bytes);
    return offset.has_value();
  };
  ZS_FAULT_POINT("client.slot.before");
  if (try_acquire()) return *offset;
  if (bytes > capacity) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a slot of ", bytes, " bytes cannot be had: the gradient window has ", capacity));
  }
  ZS_RETURN_IF_ERROR(impl_->channel->Await(try_acquire, timeout, [&] {
    absl::MutexLock lock(&impl_->mu);
    return absl::StrCat("a slot of ", bytes, " bytes of the gradient window (", capacity,
                        " bytes in ", impl_->slots.size(), " slots, ", impl_->slots.unbound(),
                        " of them acquired and not yet used)");
  }));
  return *offset;
}

absl::Status Session::AbandonSlot(uint64_t offset) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  absl::MutexLock lock(&impl_->mu);
  return impl_->slots.Abandon(offset);
}

// --- Requests -----------------------------------------------------------------------------------

absl::StatusOr<RequestId> Session::Put(const PutRequest& request) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.put.before");
  ZS_RETURN_IF_ERROR(impl_->CheckUnit(request.unit));
  const Unit& unit = layout().units()[request.unit];
  const uint64_t left = unit.elements() - std::min(request.element_offset, unit.elements());
  const bool whole_grains = request.element_offset % kGrainElements == 0 &&
                            (request.elements % kGrainElements == 0 || request.elements == left);
  if (request.elements > left || !whole_grains) {
    return absl::InvalidArgumentError(absl::StrCat(
        "put of ", request.elements, " elements from element ", request.element_offset, " of unit ",
        request.unit, ", which has ", unit.elements(), ": needs whole grains of ", kGrainElements));
  }
  SessionRequest message;
  message.mutable_put()->set_unit(request.unit);
  message.mutable_put()->set_element_offset(request.element_offset);
  message.mutable_put()->set_elements(request.elements);
  message.mutable_put()->set_window_offset(request.window_offset);
  message.mutable_put()->set_last(request.last);
  return impl_->SubmitUsingSlot(std::move(message), request.window_offset,
                                request.elements * SizeOf(unit.dtype));
}

absl::StatusOr<RequestId> Session::Gather(std::span<const uint32_t> units, GatherOptions options) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.gather.before");
  SessionRequest message;
  ZS_RETURN_IF_ERROR(impl_->SetUnits(units, message.mutable_gather()->mutable_units()));
  message.mutable_gather()->set_alone(options.alone);
  message.mutable_gather()->set_prefetch(options.prefetch);
  if (impl_->device != nullptr) {
    ZS_RETURN_IF_ERROR(impl_->Settle());
    if (options.alone || impl_->device->feeds()) return impl_->GatherOnDevice(units, options);
  }
  ZS_ASSIGN_OR_RETURN(const RequestId id, impl_->channel->Submit(std::move(message)));
  if (impl_->device != nullptr) {
    ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->Gathered(id, units)));
  }
  return id;
}

absl::StatusOr<RequestId> Session::Release(std::span<const uint32_t> units) {
  return Release(units, nullptr);
}

absl::StatusOr<RequestId> Session::Release(std::span<const uint32_t> units, StreamHandle stream) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.release.before");
  SessionRequest message;
  ZS_RETURN_IF_ERROR(impl_->SetUnits(units, message.mutable_release()->mutable_units()));
  if (impl_->device != nullptr) {
    ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->Release(units, stream)));
  }
  return impl_->channel->Submit(std::move(message));
}

absl::StatusOr<RequestId> Session::Scatter(const ScatterRequest& request) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.scatter.before");
  ZS_RETURN_IF_ERROR(impl_->CheckUnit(request.unit));
  const Unit& unit = layout().units()[request.unit];
  const size_t bitmap_bytes = (unit.parameters.size() + 7) / 8;
  if (!request.present.empty() && request.present.size() != bitmap_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "scatter of unit ", request.unit, ": the bitmap `present` has ", request.present.size(),
        " bytes, expected ", bitmap_bytes, " for ", unit.parameters.size(), " parameters"));
  }
  SessionRequest message;
  message.mutable_scatter()->set_unit(request.unit);
  message.mutable_scatter()->set_micro_step(request.micro_step);
  message.mutable_scatter()->set_window_offset(request.window_offset);
  message.mutable_scatter()->set_present(request.present);
  message.mutable_scatter()->set_weight(request.weight);
  if (impl_->device != nullptr) {
    ZS_RETURN_IF_ERROR(impl_->ScatterOnDevice(request));
    message.mutable_scatter()->set_window_offset(0);
    return impl_->channel->Submit(std::move(message));
  }
  return impl_->SubmitUsingSlot(std::move(message), request.window_offset, unit.bytes());
}

absl::StatusOr<RequestId> Session::MicroEnd(uint32_t micro_step) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.micro_end.before");
  SessionRequest message;
  message.mutable_micro_end()->set_micro_step(micro_step);
  if (impl_->device != nullptr) {
    ZS_RETURN_IF_ERROR(impl_->Settle());
    ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->plane().EndMicroStep(micro_step)));
  }
  return impl_->channel->Submit(std::move(message));
}

absl::StatusOr<RequestId> Session::Step(const StepRequest& request) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.step.before");
  if (request.user_state.size() > config().user_state_bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("user_state has ", request.user_state.size(), " bytes, this job has room for ",
                     config().user_state_bytes(), " (raise zeroshard.user_state_bytes)"));
  }
  SessionRequest message;
  trainer::v1::Step& step = *message.mutable_step();
  step.set_micro_steps(request.micro_steps);
  step.set_weight_total(request.weight_total);
  {
    absl::MutexLock lock(&impl_->mu);
    if (!request.groups.empty()) impl_->groups = request.groups;
    ToProto(impl_->groups, step.mutable_groups());
  }
  step.set_user_state(request.user_state);
  step.set_prefetch_hits(request.prefetch_hits);
  step.set_prefetch_misses(request.prefetch_misses);
  step.set_wait_us(request.wait_us);
  if (impl_->device == nullptr) return impl_->channel->Submit(std::move(message));
  ZS_RETURN_IF_ERROR(impl_->Settle());
  ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->BeforeStep()));
  ZS_ASSIGN_OR_RETURN(const RequestId id, impl_->channel->Submit(std::move(message)));
  impl_->device->StepSent(id);
  return id;
}

absl::Status Session::Wait(RequestId id) { return Wait(id, impl_->channel->timeout()); }

absl::Status Session::Wait(RequestId id, absl::Duration timeout) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.wait.before");
  absl::Status outcome = impl_->channel->Wait(id, timeout);
  if (outcome.ok() && impl_->device != nullptr) outcome = impl_->FinishOnDevice(id);
  ZS_FAULT_POINT("client.wait.after");
  return outcome;
}

bool Session::Done(RequestId id) const {
  return impl_->CheckHere().ok() && impl_->channel->Done(id);
}

void Session::OnComplete(RequestId id, std::function<void(absl::Status)> callback) {
  if (absl::Status here = impl_->CheckHere(); !here.ok()) return callback(here);
  impl_->channel->OnComplete(id, std::move(callback));
}

}  // namespace zeroshard
