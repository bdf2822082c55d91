#include "client/dataplane/reducer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPresenceOffset = offsetof(ExchangeHeader, presence);
constexpr uint64_t kBeforeOffset = offsetof(ExchangeHeader, before);

Presence FullPresence(const Unit& unit) {
  Presence presence = {};
  for (size_t position = 0; position < unit.parameters.size(); ++position) {
    presence[position / 64] |= uint64_t{1} << position % 64;
  }
  return presence;
}

}  // namespace

Reducer::Reducer(PlaneCore& core, OwnMemory& memory, DeviceAddress shared,
                 NcclCommunicator* communicator, StreamLog log)
    : core_(core),
      memory_(memory),
      shared_(shared),
      communicator_(communicator),
      log_(std::move(log)),
      single_(ReductionTree::Create(1, 1)->RankPlan().Program()),
      slots_(
          core, memory, [this](uint64_t scatter) { return IsRead(scatter); },
          [this] {
            const absl::StatusOr<bool> idle = Idle();
            return idle.ok() && !*idle;
          },
          [this](const DeviceMemory& memory) { return Register(memory); }) {}

absl::StatusOr<std::unique_ptr<Reducer>> Reducer::Create(PlaneCore& core, OwnMemory& memory,
                                                         DeviceAddress shared, RankLinks* links) {
  if (core.ranks() > kMaxSumInputs) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a job on GPUs has at most ", kMaxSumInputs, " ranks in this build, found ", core.ranks()));
  }
  ZS_ASSIGN_OR_RETURN(StreamLog log, StreamLog::Create(core.device(), StreamPriority::kHigh));
  std::unique_ptr<Reducer> reducer(new Reducer(
      core, memory, shared, links == nullptr ? nullptr : links->gradients(), std::move(log)));
  ZS_RETURN_IF_ERROR(
      reducer->Open(links == nullptr ? std::vector<uint32_t>{0} : links->node_of_rank()));
  return reducer;
}

absl::Status Reducer::Open(std::vector<uint32_t> node_of_rank) {
  const CurrentDevice current(core_.device());
  ZS_RETURN_IF_ERROR(current.status());
  ZS_ASSIGN_OR_RETURN(kernels_, CudaKernels::Load(core_.device()));
  ZS_ASSIGN_OR_RETURN(ExchangePlans plans, MakeExchangePlans(core_, node_of_rank));
  ZS_ASSIGN_OR_RETURN(buffers_, ExchangeMemory::Create(core_, log_.stream(), RoomOf(plans)));
  exchange_.emplace(
      GradientExchange::Parts{core_, log_.stream(), *kernels_, *buffers_, shared_, communicator_},
      std::move(plans), std::move(node_of_rank));
  ZS_ASSIGN_OR_RETURN(counters_,
                      RegisteredHost::Register(core_.device(), core_.options().counters->bytes()));
  ZS_ASSIGN_OR_RETURN(ready_, CudaEvent::Create(core_.device()));
  local_.resize(buffers_->order().size());
  sent_.resize(buffers_->order().size());
  uint64_t largest = 0;
  for (const uint32_t unit : buffers_->order()) {
    largest = std::max(largest, core_.layout().units()[unit].bytes());
  }
  if (largest > 0 && memory_.rings().empty()) {
    ZS_RETURN_IF_ERROR(memory_.AddRing(std::max(core_.config().slot_bytes, 2 * largest)));
  }
  for (const OwnMemory::Ring& ring : memory_.rings()) ZS_RETURN_IF_ERROR(Register(ring.memory));
  for (const DeviceMemory* memory : buffers_->exchanged()) {
    ZS_RETURN_IF_ERROR(Register(*memory));
  }
  return absl::OkStatus();
}

absl::Status Reducer::Register(const DeviceMemory& memory) {
  if (communicator_ == nullptr || memory.address() == 0) return absl::OkStatus();
  const CurrentDevice current(core_.device());
  ZS_RETURN_IF_ERROR(current.status());
  return communicator_->Register({memory.address(), memory.bytes()});
}

void Reducer::Begin(uint64_t attempt) {
  attempt_ = attempt;
  micro_step_ = next_ = 0;
  waiting_.clear();
  std::ranges::fill(local_, Presence{});
}

absl::StatusOr<bool> Reducer::IsRead(uint64_t scatter) {
  const auto mark = marks_.find(scatter);
  if (mark == marks_.end()) return false;
  ZS_ASSIGN_OR_RETURN(const bool done, log_.Done(mark->second));
  if (done) marks_.erase(mark);
  return done;
}

absl::StatusOr<Reducer::Source> Reducer::SourceOf(const DeviceScatter& scatter) {
  const auto units = core_.layout().units();
  const bool known = scatter.unit < units.size();
  if (!known || buffers_->index_of(scatter.unit) == ExchangeMemory::kNone) {
    return absl::InvalidArgumentError(absl::StrCat(
        "scatter of unit ", scatter.unit, known ? ", which is not trained" : ", which is none"));
  }
  const Unit& unit = units[scatter.unit];
  if (scatter.micro_step != micro_step_) {
    return absl::FailedPreconditionError(
        absl::StrCat("scatter of unit ", scatter.unit, " for micro-step ", scatter.micro_step,
                     "; micro-step ", micro_step_, " has not ended"));
  }
  const uint32_t index = buffers_->index_of(scatter.unit);
  if (waiting_.contains(index) || (!core_.config().local_sums && index < next_)) {
    return absl::FailedPreconditionError(absl::StrCat("a gradient of unit ", scatter.unit,
                                                      " came twice in micro-step ", micro_step_));
  }
  Source source{.dtype = unit.dtype, .weight = scatter.weight, .scatter = scatters_ + 1};
  if (scatter.present.empty()) {
    source.presence = FullPresence(unit);
  } else if (scatter.present.size() == (unit.parameters.size() + 7) / 8) {
    std::memcpy(source.presence.data(), scatter.present.data(), scatter.present.size());
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "scatter of unit ", scatter.unit, ": the bitmap `present` has ", scatter.present.size(),
        " bytes, expected ", (unit.parameters.size() + 7) / 8));
  }
  ZS_ASSIGN_OR_RETURN(source.data, slots_.Bind(scatter.slot, unit.bytes(), source.scatter));
  ++scatters_;
  return source;
}

absl::Status Reducer::Scatter(const DeviceScatter& scatter) {
  ZS_ASSIGN_OR_RETURN(const Source source, SourceOf(scatter));
  CudaStream stream = CudaStream::FromHandle(core_.device(), static_cast<CUstream>(scatter.stream));
  ZS_RETURN_IF_ERROR(stream.Record(*ready_));
  ZS_RETURN_IF_ERROR(log_.stream().WaitFor(*ready_));
  const uint32_t index = buffers_->index_of(scatter.unit);
  if (core_.config().local_sums) return SumHere(index, source);
  waiting_.emplace(index, source);
  return Advance();
}

// Adds the gradient to this rank's own sum.
absl::Status Reducer::SumHere(uint32_t index, const Source& source) {
  const uint32_t unit = buffers_->order()[index];
  const Unit& plan = core_.layout().units()[unit];
  ZS_ASSIGN_OR_RETURN(const DeviceAddress header, WriteHeader(index, source, local_[index]));
  const SumInput input{.data = source.data,
                       .presence = header + kPresenceOffset,
                       .weight = source.weight,
                       .dtype = source.dtype};
  const CurrentDevice current(core_.device());
  ZS_RETURN_IF_ERROR(current.status());
  ZS_RETURN_IF_ERROR(kernels_->Sum(
      log_.stream(), {.inputs = {&input, 1},
                      .program = &single_,
                      .parameters = buffers_->table(index),
                      .parameter_count = static_cast<uint32_t>(plan.parameters.size()),
                      .elements = plan.elements(),
                      .accumulator = buffers_->local(index),
                      .before = local_[index] == Presence{} ? 0 : header + kBeforeOffset}));
  for (uint32_t word = 0; word < kPresenceWords; ++word) {
    local_[index][word] |= source.presence[word];
  }
  return Finish(index, source, "sum");
}

absl::Status Reducer::Advance() {
  while (next_ < buffers_->order().size() && waiting_.contains(next_)) {
    const Source source = waiting_.extract(next_).mapped();
    ZS_RETURN_IF_ERROR(Exchange(next_++, source));
  }
  return absl::OkStatus();
}

absl::Status Reducer::EndMicroStep(uint32_t micro_step) {
  if (micro_step != micro_step_) {
    return absl::FailedPreconditionError(absl::StrCat("the end of micro-step ", micro_step,
                                                      ", while ", micro_step_, " is under way"));
  }
  if (!core_.config().local_sums) {
    while (next_ < buffers_->order().size()) {
      ZS_RETURN_IF_ERROR(Advance());
      if (next_ == buffers_->order().size()) break;
      const uint32_t unit = buffers_->order()[next_];
      ZS_RETURN_IF_ERROR(Exchange(next_++, {.dtype = core_.layout().units()[unit].dtype}));
    }
    ZS_RETURN_IF_ERROR(CheckHeaders());
  }
  next_ = 0;
  ++micro_step_;
  return absl::OkStatus();
}

absl::Status Reducer::Boundary() {
  if (!waiting_.empty() || micro_step_ == 0) {
    return absl::FailedPreconditionError("a step without the end of its last micro-step");
  }
  if (core_.config().local_sums) {
    --micro_step_;
    at_boundary_ = true;
    for (uint32_t index = 0; index < buffers_->order().size(); ++index) {
      ZS_RETURN_IF_ERROR(
          Exchange(index, {.data = buffers_->local(index), .presence = local_[index]}));
    }
    ZS_RETURN_IF_ERROR(CheckHeaders());
    at_boundary_ = false;
    ++micro_step_;
  }
  ZS_FAULT_POINT("client.dataplane.boundary");
  ZS_RETURN_IF_ERROR(
      log_.stream().WriteValue(counters_.address() + offsetof(DeviceCounters, summed), attempt_));
  return log_.Mark({"the step's end, behind unit", 0}).status();
}

// Copies this rank's header to its place on the device.
absl::StatusOr<DeviceAddress> Reducer::WriteHeader(uint32_t index, const Source& source,
                                                   const Presence& before) {
  const uint32_t turn = Turn();
  ZS_RETURN_IF_ERROR(core_.Await([&] { return log_.Done(sent_[index][turn]); },
                                 "the exchange of an earlier gradient"));
  ExchangeHeader& header = buffers_->outgoing(index, turn);
  header = {.tag = MakeTag(attempt_, micro_step_),
            .unit = buffers_->order()[index],
            .weight = source.weight,
            .presence = source.presence,
            .before = before};
  const DeviceAddress address = buffers_->header(index, core_.rank());
  ZS_RETURN_IF_ERROR(log_.stream().CopyToDevice(address, &header, sizeof(header)));
  return address;
}

absl::Status Reducer::Exchange(uint32_t index, const Source& source) {
  ZS_FAULT_POINT("client.dataplane.exchange");
  const CurrentDevice current(core_.device());
  ZS_RETURN_IF_ERROR(current.status());
  ZS_RETURN_IF_ERROR(WriteHeader(index, source, {}).status());
  // Nothing is there yet in the first sum of a step.
  const bool first = core_.config().local_sums || micro_step_ == 0;
  ZS_RETURN_IF_ERROR(exchange_->Run(index, {source.data, source.dtype}, first));
  return Finish(index, source, "exchange of the gradient");
}

absl::Status Reducer::Finish(uint32_t index, const Source& source, const char* kind) {
  ZS_ASSIGN_OR_RETURN(const uint64_t mark, log_.Mark({kind, buffers_->order()[index]}));
  sent_[index][Turn()] = mark;
  if (source.scatter != 0) marks_[source.scatter] = mark;
  return absl::OkStatus();
}

// Compares the headers of the micro-step that ends, in the order of the stream: a step whose ranks
// were not at the same place is known as failed before the worker is told of its end.
absl::Status Reducer::CheckHeaders() {
  if (communicator_ == nullptr || buffers_->order().empty()) return absl::OkStatus();
  const std::shared_ptr<PinnedHost> arrived = buffers_->arrived();
  ZS_RETURN_IF_ERROR(
      log_.stream().CopyToHost(arrived->data(), buffers_->header(0, 0), buffers_->headers_bytes()));
  const auto check = [arrived, counters = core_.options().counters, mismatch = core_.mismatch(),
                      order = buffers_->order(), ranks = core_.ranks(),
                      tag = MakeTag(attempt_, micro_step_)] {
    const auto* header = reinterpret_cast<const ExchangeHeader*>(arrived->data());
    for (const uint32_t unit : order) {
      for (uint32_t rank = 0; rank < ranks; ++rank, ++header) {
        if (header->tag == tag && header->unit == unit) continue;
        if (mismatch->found.load(std::memory_order_relaxed)) return;
        mismatch->rank = rank;
        mismatch->unit = unit;
        mismatch->tag = header->tag;
        mismatch->expected = tag;
        uint64_t none = 0;
        counters->As<DeviceCounters>()->error.compare_exchange_strong(
            none, static_cast<uint64_t>(absl::StatusCode::kAborted));
        mismatch->found.store(true, std::memory_order_release);
        return;
      }
    }
  };
  return log_.stream().Notify(check);
}

}  // namespace zeroshard
