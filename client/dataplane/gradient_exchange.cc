#include "client/dataplane/gradient_exchange.h"

#include <algorithm>
#include <cstddef>

#include "base/status.h"
#include "client/dataplane/exchange_header.h"

namespace zeroshard {
namespace {

constexpr uint64_t kWeightOffset = offsetof(ExchangeHeader, weight);
constexpr uint64_t kPresenceOffset = offsetof(ExchangeHeader, presence);

}  // namespace

absl::StatusOr<ExchangePlans> MakeExchangePlans(const PlaneCore& core,
                                                std::span<const uint32_t> node_of_rank) {
  const DataPlaneConfig& config = core.config();
  ZS_ASSIGN_OR_RETURN(
      const ReductionTree tree,
      ReductionTree::Create(core.ranks(), std::max<uint32_t>(config.reduction_group, 1)));
  ExchangePlans plans;
  for (const Unit& unit : core.layout().units()) {
    const uint64_t element = config.local_sums ? sizeof(float) : SizeOf(unit.dtype);
    if (plans.contains(element)) continue;
    ZS_ASSIGN_OR_RETURN(plans[element], MakeExchangePlan(tree, node_of_rank, core.rank(), element));
  }
  return plans;
}

ExchangeRoom RoomOf(const ExchangePlans& plans) {
  ExchangeRoom room;
  for (const auto& [element, plan] : plans) {
    room.pieces = std::max(room.pieces, plan.piece_slots);
    room.parts = std::max(room.parts, plan.part_slots);
  }
  return room;
}

absl::Status GradientExchange::Run(uint32_t index, const Own& own, bool first) {
  const ExchangePlan& plan = plans_.at(SizeOf(own.dtype));
  ZS_RETURN_IF_ERROR(Exchange(MessagesOf(plan.first, index, own)));
  for (const ExchangeSum& part : plan.parts) ZS_RETURN_IF_ERROR(MakePart(part, index, own));
  if (plan.two_steps) {
    Messages messages = MessagesOf(plan.second, index, own);
    AddParts(plan, index, messages);
    ZS_RETURN_IF_ERROR(Exchange(messages));
    ZS_RETURN_IF_ERROR(MergeParts(plan, index));
  }
  return Accumulate(plan, index, own, first);
}

GradientExchange::Messages GradientExchange::MessagesOf(const ExchangePlan::Step& step,
                                                        uint32_t index, const Own& own) const {
  const ExchangeMemory& memory = parts_.memory;
  const Layout& layout = parts_.core.layout();
  const uint32_t unit = memory.order()[index];
  const uint64_t element = SizeOf(own.dtype);
  Messages messages;
  for (const uint32_t peer : step.peers) {
    messages.sends.push_back(
        {peer, {memory.header(index, parts_.core.rank()), sizeof(ExchangeHeader)}});
    messages.receives.push_back({peer, {memory.header(index, peer), sizeof(ExchangeHeader)}});
  }
  for (const ExchangeMessage& piece : step.pieces_out) {
    const GrainRange slice = layout.slice(unit, piece.owner);
    // The bytes of what is not there do not matter, but they must be as many.
    const DeviceAddress data =
        own.data == 0 ? memory.nothing() : own.data + slice.first_element() * element;
    messages.sends.push_back({piece.peer, {data, slice.elements() * element}});
  }
  for (const ExchangeMessage& piece : step.pieces_in) {
    messages.receives.push_back(
        {piece.peer,
         {memory.piece(piece.slot), layout.slice(unit, piece.owner).elements() * element}});
  }
  return messages;
}

void GradientExchange::AddParts(const ExchangePlan& plan, uint32_t index,
                                Messages& messages) const {
  const uint32_t unit = parts_.memory.order()[index];
  const auto message = [&](const ExchangeMessage& part) {
    const uint64_t elements = parts_.core.layout().slice(unit, part.owner).elements();
    return NcclMessage{part.peer, {parts_.memory.part(part.slot), elements * sizeof(float)}};
  };
  for (const ExchangeMessage& part : plan.parts_out) messages.sends.push_back(message(part));
  for (const ExchangeMessage& part : plan.parts_in) messages.receives.push_back(message(part));
}

absl::Status GradientExchange::Exchange(const Messages& messages) {
  if (parts_.communicator == nullptr) return absl::OkStatus();
  for (const NcclMessage& message : messages.sends) {
    sent_bytes_ += message.buffer.bytes;
    if (node_of_rank_[message.peer] != node_of_rank_[parts_.core.rank()]) {
      between_nodes_ += message.buffer.bytes;
    }
  }
  return parts_.communicator->Exchange(parts_.stream.handle(), messages.sends, messages.receives);
}

std::vector<SumInput> GradientExchange::InputsOf(const ExchangeSum& sum, uint32_t index,
                                                 const Own& own) const {
  const ExchangeMemory& memory = parts_.memory;
  const uint64_t first =
      parts_.core.layout().slice(memory.order()[index], sum.owner).first_element() *
      SizeOf(own.dtype);
  std::vector<SumInput> inputs;
  for (const ExchangeInput& input : sum.inputs) {
    if (input.kind == ExchangeInput::Kind::kPart) {
      // Its ranks' weights are in it.
      inputs.push_back({.data = memory.part(input.slot), .presence = memory.presence(input.slot)});
      continue;
    }
    const DeviceAddress header = memory.header(index, input.ranks.begin);
    DeviceAddress data = 0;
    if (input.kind == ExchangeInput::Kind::kPiece) data = memory.piece(input.slot);
    if (input.kind == ExchangeInput::Kind::kOwn && own.data != 0) data = own.data + first;
    inputs.push_back({.data = data,
                      .presence = header + kPresenceOffset,
                      .weight_address = header + kWeightOffset,
                      .dtype = own.dtype});
  }
  return inputs;
}

absl::Status GradientExchange::MakePart(const ExchangeSum& part, uint32_t index, const Own& own) {
  const uint32_t unit = parts_.memory.order()[index];
  const GrainRange slice = parts_.core.layout().slice(unit, part.owner);
  if (slice.size() == 0) return absl::OkStatus();
  const std::vector<SumInput> inputs = InputsOf(part, index, own);
  return parts_.kernels.Sum(parts_.stream,
                            {.inputs = inputs,
                             .program = &part.program,
                             .parameters = parts_.memory.table(index),
                             .parameter_count = static_cast<uint32_t>(
                                 parts_.core.layout().units()[unit].parameters.size()),
                             .first = slice.first_element(),
                             .elements = slice.elements(),
                             .accumulator = parts_.memory.part(part.slot)});
}

// What the parts that have come hold.
absl::Status GradientExchange::MergeParts(const ExchangePlan& plan, uint32_t index) {
  for (const ExchangeInput& input : plan.sum.inputs) {
    if (input.kind != ExchangeInput::Kind::kPart) continue;
    std::vector<DeviceAddress> presences;
    for (uint32_t rank = input.ranks.begin; rank < input.ranks.end; ++rank) {
      presences.push_back(parts_.memory.header(index, rank) + kPresenceOffset);
    }
    ZS_RETURN_IF_ERROR(parts_.kernels.MergePresence(
        parts_.stream, {.inputs = presences, .after = parts_.memory.presence(input.slot)}));
  }
  return absl::OkStatus();
}

absl::Status GradientExchange::Accumulate(const ExchangePlan& plan, uint32_t index, const Own& own,
                                          bool first) {
  const PlaneCore& core = parts_.core;
  const uint32_t unit = parts_.memory.order()[index];
  const GrainRange slice = core.layout().slice(unit, core.rank());
  const DeviceUnitPlace place = core.place(unit);
  const DeviceAddress presence = parts_.shared + place.presence;
  const std::vector<SumInput> inputs = InputsOf(plan.sum, index, own);
  if (slice.size() > 0) {
    ZS_RETURN_IF_ERROR(parts_.kernels.Sum(
        parts_.stream,
        {.inputs = inputs,
         .program = &plan.sum.program,
         .parameters = parts_.memory.table(index),
         .parameter_count = static_cast<uint32_t>(core.layout().units()[unit].parameters.size()),
         .first = slice.first_element(),
         .elements = slice.elements(),
         .accumulator = parts_.shared + place.accumulator,
         .accumulator_dtype = core.config().accumulator_dtype,
         .before = first ? 0 : presence}));
  }
  std::vector<DeviceAddress> presences;
  for (const SumInput& input : inputs) presences.push_back(input.presence);
  return parts_.kernels.MergePresence(
      parts_.stream, {.inputs = presences, .before = first ? 0 : presence, .after = presence});
}

}  // namespace zeroshard
