// A trainer whose run is a function of its command line: one process is one rank.
//
// Its gradients depend on (step, micro-step, rank, parameter, element) and on the parameters'
// values as the window shows them, so whatever a daemon loses, repeats or tears shows in the end.
// Units are gathered and released forward, then backward, as the PyTorch engine does. It may be
// killed at any instant and started again with the same arguments: it goes on at the committed
// step, and fails when its user_state does not belong to that step.
//
// Prints one JSON line at the end; exits with 0 when the run is complete.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/checksum.h"
#include "base/config.h"
#include "base/dtype.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "client/session.h"
#include "proto/model.pb.h"
#include "tests/e2e/trainer_device.h"
#include "tests/e2e/trainer_options.h"

namespace zeroshard {
namespace {

// splitmix64's finaliser.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

template <typename... Rest>
uint64_t Mix(uint64_t x, uint64_t next, Rest... rest) {
  return Mix(Mix(x) + 0x9e3779b97f4a7c15ULL * (next + 1), rest...);
}

// In [-1, 1), with 24 bits.
float Uniform(uint64_t hash) {
  return static_cast<float>(static_cast<int64_t>(hash >> 40) - (1 << 23)) / (1 << 23);
}

// A worker that dies fails a save or export under way; a little later there is another one.
absl::Status Patiently(const std::function<absl::Status()>& call) {
  absl::Status status = call();
  for (int i = 0; i < 50 && (absl::IsUnavailable(status) || absl::IsFailedPrecondition(status));
       ++i) {
    absl::SleepFor(absl::Milliseconds(100));
    status = call();
  }
  return status;
}

std::string Text(uint64_t checksum) { return absl::StrCat(absl::Hex(checksum, absl::kZeroPad16)); }

// What a rank keeps with every step.
struct UserState {
  uint64_t step = 0;
  uint64_t checksum = 0;  // over all gradients that this rank has sent
};

class Trainer {
 public:
  // `device`: null on the host.
  Trainer(const TrainerOptions& options, Session* session, TrainerDevice* device)
      : options_(options), session_(*session), device_(device), layout_(session->layout()) {}

  // Takes up where the committed step left this rank.
  absl::Status Begin();
  absl::Status Step();
  absl::Status Finish();

  uint64_t step() const { return state_.step; }
  absl::StatusOr<uint64_t> AllParameters();

 private:
  bool IsResident(uint32_t unit) const {
    return session_.config().stage() < 3 ||
           layout_.persistent(unit, session_.config().persistence_threshold());
  }
  absl::StatusOr<std::vector<float>> Values(uint32_t unit) const;
  // Until the gathered units are readable, on GPUs: by what the stream is given from now on.
  absl::Status Await(RequestId gather, std::span<const uint32_t> units);
  absl::Status Release(std::span<const uint32_t> units);
  float Weight(uint32_t micro) const {
    if (!options_.weighted) return 1.0F;
    return 1.0F + static_cast<float>(Mix(options_.seed, step(), micro, options_.rank) % 3);
  }
  absl::Status Put(uint32_t unit);
  absl::Status GatherResident();
  absl::Status Forward();
  absl::Status Backward(uint32_t micro, double loss_scale);
  absl::Status SendGradient(uint32_t micro, uint32_t unit, double loss_scale);
  absl::StatusOr<std::string> Gradient(uint32_t micro, uint32_t unit, double loss_scale,
                                       std::vector<float>& values);
  // Room for the unit's gradient with these values; the offset that a scatter names.
  absl::StatusOr<uint64_t> GradientSlot(uint32_t unit, const std::vector<float>& values);
  absl::Status WriteSlot(uint32_t unit, const std::vector<float>& values, uint64_t slot);

  const TrainerOptions& options_;
  Session& session_;
  TrainerDevice* const device_;
  const Layout& layout_;
  UserState state_;
  bool was_complete_ = false;  // the run had already come to its end when this process started
};

absl::Status Trainer::Begin() {
  const SessionState& state = session_.state();
  if (state.step > 0) {
    if (state.user_state.size() != sizeof(state_)) {
      return absl::DataLossError(absl::StrCat("user_state of step ", state.step, " has ",
                                              state.user_state.size(), " bytes"));
    }
    std::memcpy(&state_, state.user_state.data(), sizeof(state_));
  } else if (!state.user_state.empty()) {
    return absl::DataLossError("there is a user_state before the first step");
  }
  if (state_.step != state.step) {
    return absl::DataLossError(absl::StrCat("the session stands at step ", state.step,
                                            ", but this rank's user_state is of step ",
                                            state_.step));
  }
  was_complete_ = state.step >= options_.steps;
  for (uint32_t unit = 0; unit < layout_.units().size(); ++unit) {
    if (!state.initialized && options_.rank == 0) ZS_RETURN_IF_ERROR(Put(unit));
  }
  return GatherResident();
}

absl::Status Trainer::Put(uint32_t unit) {
  const Unit& plan = layout_.units()[unit];
  if (plan.elements() == 0) return absl::OkStatus();
  std::vector<float> values(plan.elements());
  for (const uint32_t parameter : plan.parameters) {
    const ParameterPlace& place = layout_.place(parameter);
    for (uint64_t i = 0; i < place.elements; ++i) {
      values[place.offset + i] = Uniform(Mix(options_.seed, ~uint64_t{0}, parameter, i));
    }
  }
  ZS_ASSIGN_OR_RETURN(const uint64_t slot, session_.AcquireSlot(plan.bytes()));
  ZS_RETURN_IF_ERROR(WriteSlot(unit, values, slot));
  ZS_ASSIGN_OR_RETURN(
      const RequestId id,
      session_.Put(
          {.unit = unit, .elements = plan.elements(), .window_offset = slot, .last = true}));
  return session_.Wait(id);
}

absl::Status Trainer::GatherResident() {
  std::vector<uint32_t> units;
  for (uint32_t unit = 0; unit < layout_.units().size(); ++unit) {
    if (IsResident(unit)) units.push_back(unit);
  }
  if (units.empty()) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const RequestId id, session_.Gather(units, {.alone = true}));
  return session_.Wait(id);
}

absl::StatusOr<std::vector<float>> Trainer::Values(uint32_t unit) const {
  const Unit& plan = layout_.units()[unit];
  std::vector<float> values(plan.elements());
  const std::byte* bytes = session_.parameter_window().data() + plan.window_offset;
  std::vector<std::byte> copy;
  if (device_ != nullptr && !values.empty()) {
    ZS_RETURN_IF_ERROR(session_.WaitOn({&unit, 1}, device_->stream()));
    copy.resize(plan.bytes());
    ZS_RETURN_IF_ERROR(device_->Read(session_.parameter_address(unit), copy));
    bytes = copy.data();
  }
  ConvertToFloat(plan.dtype, bytes, values.data(), values.size());
  return values;
}

absl::Status Trainer::Await(RequestId gather, std::span<const uint32_t> units) {
  return device_ == nullptr ? session_.Wait(gather) : session_.WaitOn(units, device_->stream());
}

absl::Status Trainer::Release(std::span<const uint32_t> units) {
  return device_ == nullptr ? session_.Release(units).status()
                            : session_.Release(units, device_->stream()).status();
}

absl::Status Trainer::Step() {
  const double loss_scale = state_.step == session_.state().step
                                ? session_.state().loss_scale
                                : session_.step_result().loss_scale;
  double weights = 0.0;
  for (uint32_t micro = 0; micro < options_.micro_steps; ++micro) {
    ZS_RETURN_IF_ERROR(Forward());
    ZS_RETURN_IF_ERROR(Backward(micro, loss_scale));
    weights += Weight(micro);
    ZS_RETURN_IF_ERROR(session_.MicroEnd(micro).status());
  }
  const UserState next{state_.step + 1, state_.checksum};
  StepRequest request{
      .micro_steps = options_.micro_steps,
      .weight_total = options_.weighted ? weights : 0.0,
      .groups = GroupsOfStep(options_, state_.step),
      .user_state = std::string(reinterpret_cast<const char*>(&next), sizeof(next))};
  ZS_ASSIGN_OR_RETURN(const RequestId id, session_.Step(request));
  ZS_RETURN_IF_ERROR(session_.Wait(id));
  state_ = next;
  if (session_.step_result().step != state_.step) {
    return absl::DataLossError(
        absl::StrCat("step ", state_.step, " was answered as step ", session_.step_result().step));
  }
  if (options_.progress) {
    std::cout << nlohmann::json{{"at", state_.step},
                                {"sent", Text(state_.checksum)},
                                {"norm", session_.step_result().grad_norm}}
              << std::endl;
  }
  absl::SleepFor(absl::Milliseconds(options_.pause_ms));
  return absl::OkStatus();
}

// Units appear one after the other, the next one asked for ahead.
absl::Status Trainer::Forward() {
  std::vector<uint32_t> order;
  for (uint32_t unit = 0; unit < layout_.units().size(); ++unit) {
    if (!IsResident(unit)) order.push_back(unit);
  }
  if (options_.swap_at == static_cast<int64_t>(state_.step)) {
    std::reverse(order.begin(), order.end());
  }
  std::vector<RequestId> gathers(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t ahead = i == 0 ? 0 : i + 1; ahead < std::min(i + 2, order.size()); ++ahead) {
      ZS_ASSIGN_OR_RETURN(gathers[ahead],
                          session_.Gather({&order[ahead], 1}, {.prefetch = ahead > i}));
    }
    ZS_RETURN_IF_ERROR(Await(gathers[i], {&order[i], 1}));
    ZS_RETURN_IF_ERROR(Release({&order[i], 1}));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Backward(uint32_t micro, double loss_scale) {
  for (uint32_t unit = layout_.units().size(); unit-- > 0;) {
    const bool gathered = !IsResident(unit);
    if (gathered) {
      ZS_ASSIGN_OR_RETURN(const RequestId id, session_.Gather({&unit, 1}));
      ZS_RETURN_IF_ERROR(Await(id, {&unit, 1}));
    }
    if (layout_.units()[unit].trainable && layout_.units()[unit].elements() > 0) {
      ZS_RETURN_IF_ERROR(SendGradient(micro, unit, loss_scale));
    }
    if (gathered) ZS_RETURN_IF_ERROR(Release({&unit, 1}));
  }
  return absl::OkStatus();
}

absl::Status Trainer::SendGradient(uint32_t micro, uint32_t unit, double loss_scale) {
  std::vector<float> values;
  ZS_ASSIGN_OR_RETURN(const std::string present, Gradient(micro, unit, loss_scale, values));
  ZS_ASSIGN_OR_RETURN(const uint64_t slot, GradientSlot(unit, values));
  return session_
      .Scatter({.unit = unit,
                .micro_step = micro,
                .window_offset = slot,
                .present = present,
                .weight = options_.weighted ? Weight(micro) : 0.0F,
                .stream = device_ == nullptr ? nullptr : device_->stream()})
      .status();
}

absl::StatusOr<uint64_t> Trainer::GradientSlot(uint32_t unit, const std::vector<float>& values) {
  const Unit& plan = layout_.units()[unit];
  if (device_ == nullptr) {
    ZS_ASSIGN_OR_RETURN(const uint64_t slot, session_.AcquireSlot(plan.bytes()));
    ZS_RETURN_IF_ERROR(WriteSlot(unit, values, slot));
    return slot;
  }
  ZS_ASSIGN_OR_RETURN(const DeviceSlot slot, session_.AcquireDeviceSlot(plan.bytes()));
  std::vector<std::byte> bytes(plan.bytes());
  ConvertFromFloat(plan.dtype, values.data(), bytes.data(), values.size());
  ZS_FAULT_STATUS("trainer.slot.half_written");
  ZS_RETURN_IF_ERROR(device_->Write(slot.address, bytes));
  return slot.offset;
}

// Fills `values` and returns the bitmap of the parameters that have a gradient.
absl::StatusOr<std::string> Trainer::Gradient(uint32_t micro, uint32_t unit, double loss_scale,
                                              std::vector<float>& values) {
  const Unit& plan = layout_.units()[unit];
  ZS_ASSIGN_OR_RETURN(const std::vector<float> parameters, Values(unit));
  values.assign(plan.elements(), 0.0F);
  std::string present((plan.parameters.size() + 7) / 8, '\0');
  for (size_t position = 0; position < plan.parameters.size(); ++position) {
    const uint32_t parameter = plan.parameters[position];
    const ParameterPlace& place = layout_.place(parameter);
    const uint64_t key = Mix(options_.seed, state_.step, micro, options_.rank, parameter);
    if (options_.absent && Mix(key, 99) % 3 == 0) continue;
    present[position / 8] |= static_cast<char>(1 << position % 8);
    for (uint64_t i = place.offset; i < place.offset + place.elements; ++i) {
      const float gradient = Uniform(Mix(key, i)) + 0.125F * parameters[i];
      values[i] = static_cast<float>(gradient * loss_scale);
    }
  }
  state_.checksum = Xxh3_64(values.data(), values.size() * sizeof(float), state_.checksum);
  return present;
}

absl::Status Trainer::WriteSlot(uint32_t unit, const std::vector<float>& values, uint64_t slot) {
  const DType dtype = layout_.units()[unit].dtype;
  std::byte* target = session_.gradient_window().data() + slot;
  const size_t half = values.size() / 2;
  ConvertFromFloat(dtype, values.data(), target, half);
  ZS_FAULT_STATUS("trainer.slot.half_written");
  ConvertFromFloat(dtype, values.data() + half, target + half * SizeOf(dtype),
                   values.size() - half);
  return absl::OkStatus();
}

// The checksum of all parameters as fp32, in their order; writes them to the dump.
absl::StatusOr<uint64_t> Trainer::AllParameters() {
  const auto units = static_cast<uint32_t>(layout_.units().size());
  std::vector<std::vector<float>> values(units);
  const uint32_t at_once = options_.one_by_one ? 1 : units;
  for (uint32_t first = 0; first < units; first += at_once) {
    std::vector<uint32_t> some(at_once);
    // Ranks on GPUs gather together, or each alone in an order of its own.
    const bool alone = device_ == nullptr || options_.one_by_one;
    std::iota(some.begin(), some.end(), at_once == 1 ? (first + options_.rank) % units : first);
    ZS_ASSIGN_OR_RETURN(const RequestId id, session_.Gather(some, {.alone = alone}));
    ZS_RETURN_IF_ERROR(session_.Wait(id));
    for (const uint32_t unit : some) {
      ZS_ASSIGN_OR_RETURN(values[unit], Values(unit));
    }
    ZS_RETURN_IF_ERROR(Release(some));
  }
  Xxh3Stream checksum;
  std::ofstream dump;
  if (!options_.dump.empty()) dump.open(options_.dump, std::ios::binary | std::ios::trunc);
  for (uint32_t parameter = 0; parameter < layout_.parameters().size(); ++parameter) {
    const ParameterPlace& place = layout_.place(parameter);
    const char* first = reinterpret_cast<const char*>(values[place.unit].data() + place.offset);
    checksum.Update({first, place.elements * sizeof(float)});
    dump.write(first, static_cast<std::streamsize>(place.elements * sizeof(float)));
  }
  dump.flush();
  if (!options_.dump.empty() && !dump) {
    return absl::UnavailableError(absl::StrCat("cannot write ", options_.dump));
  }
  return checksum.Digest();
}

absl::Status Trainer::Finish() {
  ZS_ASSIGN_OR_RETURN(const uint64_t checksum, AllParameters());
  const StepResult result = session_.step_result();
  if (options_.rank == 0 && !options_.save.empty()) {
    const absl::Status saved = Patiently([&] { return session_.Save(options_.save).status(); });
    // A predecessor that died after its checkpoint was complete has written this one.
    if (!saved.ok() && !(was_complete_ && absl::IsAlreadyExists(saved))) return saved;
  }
  if (options_.rank == 0 && !options_.export_name.empty()) {
    ZS_RETURN_IF_ERROR(Patiently(
        [&] { return session_.Export(options_.export_name, /*overwrite=*/true).status(); }));
  }
  nlohmann::json line = {{"rank", options_.rank},
                         {"step", state_.step},
                         {"checksum", Text(checksum)},
                         {"sent", Text(state_.checksum)},
                         {"generation", session_.generation()},
                         {"resumed", session_.state().resumed},
                         {"between_nodes", session_.device_stats().scattered_between_nodes}};
  if (result.step == state_.step) {
    line["updates"] = result.updates;
    line["loss_scale"] = result.loss_scale;
    line["norm"] = result.grad_norm;
    line["norm_valid"] = result.norm_valid != 0;
    line["skipped"] = result.skipped != 0;
  }
  std::cout << line.dump() << std::endl;
  if (options_.linger) std::cin.ignore(std::numeric_limits<std::streamsize>::max());
  return session_.Detach(options_.keep ? Session::JobState::kKeep : Session::JobState::kEnd);
}

absl::Status Train(const TrainerOptions& options, Session& session, TrainerDevice* device) {
  Trainer trainer(options, &session, device);
  ZS_RETURN_IF_ERROR(trainer.Begin());
  while (trainer.step() < options.steps) {
    ZS_RETURN_IF_ERROR(trainer.Step());
    // Looks at the parameters while the others go on.
    const bool looks = device != nullptr && options.one_by_one && options.rank == 0;
    if (looks && trainer.step() == 2) ZS_RETURN_IF_ERROR(trainer.AllParameters().status());
  }
  return trainer.Finish();
}

absl::Status Run(const TrainerOptions& options) {
  std::unique_ptr<TrainerDevice> device;
  std::shared_ptr<TrainerMemory> memory;
  std::string gave_up;
  for (uint32_t life = 1;; ++life) {
    ZS_ASSIGN_OR_RETURN(AttachOptions attach, ToAttachOptions(options));
    attach.device_memory = memory;
    attach.gave_up = gave_up;
    auto session = Session::Attach(std::move(attach));
    absl::Status status = session.status();
    if (status.ok() && (*session)->on_device() && device == nullptr) {
      ZS_ASSIGN_OR_RETURN(device, TrainerDevice::Open((*session)->device().ordinal));
    }
    if (status.ok()) status = Train(options, **session, device.get());
    // A generation that ended takes the step in flight with it, and nothing else.
    if (!absl::IsAborted(status) || life >= options.lives) return status;
    std::cerr << "rank " << options.rank << " goes on after: " << status << std::endl;
    if (!session.ok()) continue;
    gave_up = std::string(status.message());
    (*session)->Close();
    memory = (*session)->device_memory();
  }
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  absl::Status status = zeroshard::ArmFaultPointsFromEnv();
  const zeroshard::TrainerOptions options = zeroshard::ParseTrainerOptions(argc, argv);
  if (status.ok()) status = zeroshard::Run(options);
  if (status.ok()) return 0;
  std::cerr << "rank " << options.rank << ": " << status << std::endl;
  return 1;
}
