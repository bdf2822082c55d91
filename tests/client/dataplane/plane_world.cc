#include "tests/client/dataplane/plane_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "client/dataplane/trainer_data_plane.h"
#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/fakes/nccl/fake_nccl.h"
#include "worker/reduce_kernel.h"
#include "worker/reduction_tree.h"

namespace zeroshard {
namespace {

constexpr uint64_t kAlignment = 256;

uint64_t RoundUp(uint64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

bool Has(const std::optional<Gradient>& gradient, size_t position) {
  if (!gradient.has_value()) return false;
  return gradient->present.empty() || (gradient->present[position / 8] >> (position % 8) & 1) != 0;
}

// Adds these inputs to a parameter's elements [begin, end); the stretch after it is padding.
void SumParameter(const PlaneWorld& world, const std::vector<ReduceSource>& sources,
                  const std::vector<char>& present, Accumulator accumulator, uint64_t begin,
                  uint64_t end) {
  const auto flags = std::make_unique<bool[]>(present.size());
  std::ranges::copy(present, flags.get());
  const uint32_t group = present.size() == 1 ? 1 : world.options().config.reduction_group;
  const ReductionPlan plan =
      ReductionTree::Create(static_cast<uint32_t>(present.size()), group)->RankPlan();
  Reduce(plan.Program(absl::MakeConstSpan(flags.get(), present.size())), sources, accumulator,
         begin, end);
}

}  // namespace

PlaneWorld::PlaneWorld(const WorldOptions& options, const std::string& cuda_settings)
    : options_(options), layout_(*Layout::Create({{.name = "none"}}, 1)), ranks_(options.ranks) {
  fake_cuda::ResetFakeCuda(absl::StrCat("devices=", options.ranks, ",memory=256M,poison=1",
                                        cuda_settings.empty() ? "" : ",", cuda_settings));
  std::vector<ParameterSpec> specs;
  for (uint32_t i = 0; i < options.sizes.size(); ++i) {
    specs.push_back({.name = absl::StrCat("p", i),
                     .shape = {options.sizes[i]},
                     .dtype = options.dtype,
                     .trainable = std::ranges::find(options.frozen, i) == options.frozen.end(),
                     .module = absl::StrCat("m", i / 2)});
  }
  layout_ = *Layout::Create(std::move(specs), options.ranks);
  PlaceUnits();
  for (uint32_t r = 0; r < options.ranks; ++r) {
    WorldRank& rank = ranks_[r];
    rank.device = *CudaDevice::Open(static_cast<int>(r));
    rank.shared = *DeviceMemory::Create(*rank.device, shared_bytes_[r]);
    rank.stream = *CudaStream::Create(*rank.device, StreamPriority::kNormal);
    const UniqueFd fd = *CreateSealedMemfd("counters", kDeviceCounterBytes);
    rank.counters = std::make_shared<const MappedRegion>(
        *MappedRegion::Map(fd.get(), kDeviceCounterBytes, Access::kReadWrite));
  }
}

PlaneWorld::~PlaneWorld() {
  for (WorldRank& rank : ranks_) rank.plane.reset();
}

void PlaneWorld::PlaceUnits() {
  for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
    uint64_t offset = 0;
    const auto take = [&offset](uint64_t bytes) {
      const uint64_t at = offset;
      offset += RoundUp(bytes);
      return at;
    };
    std::vector<DeviceUnitPlace>& places = places_.emplace_back(layout_.units().size());
    for (uint32_t unit = 0; unit < places.size(); ++unit) {
      const uint64_t elements = layout_.slice(unit, rank).elements();
      places[unit].accumulator = take(elements * SizeOf(options_.config.accumulator_dtype));
      places[unit].presence = take(sizeof(Presence));
      places[unit].parameters = take(elements * SizeOf(options_.dtype));
    }
    shared_bytes_.push_back(offset);
  }
}

std::vector<uint32_t> PlaneWorld::Trainable() const {
  std::vector<uint32_t> units;
  for (uint32_t unit = 0; unit < layout_.units().size(); ++unit) {
    if (layout_.units()[unit].trainable && layout_.units()[unit].grains > 0) units.push_back(unit);
  }
  return units;
}

absl::StatusOr<std::string> PlaneWorld::Meet(const std::string& key,
                                             const std::optional<std::string>& value,
                                             absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  if (value.has_value()) keys_[key] = *value;
  const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return keys_.contains(key); };
  if (mu_.AwaitWithTimeout(absl::Condition(&there), timeout)) return keys_[key];
  return absl::DeadlineExceededError(absl::StrCat("key ", key, " was not set"));
}

DataPlaneOptions PlaneWorld::PlaneOptions(uint32_t r) {
  WorldRank& rank = ranks_[r];
  DataPlaneOptions options{.layout = layout_,
                           .config = options_.config,
                           .places = places_[r],
                           .rank = r,
                           .job = "test",
                           .generation = generation_,
                           .shared = *rank.shared->Export(),
                           .shared_bytes = rank.shared->bytes(),
                           .counters = rank.counters,
                           .timeout = options_.timeout};
  if (!options_.nodes.empty()) options.node = options_.nodes[r];
  std::memcpy(options.device_uuid.data(), rank.device->uuid().data(), options.device_uuid.size());
  options.rendezvous = [this](const std::string& key, const std::optional<std::string>& value,
                              absl::Duration timeout) { return Meet(key, value, timeout); };
  return options;
}

void PlaneWorld::Connect() {
  ++generation_;
  std::vector<std::shared_ptr<TrainerMemory>> memory;
  for (WorldRank& rank : ranks_) {
    memory.push_back(rank.plane == nullptr ? nullptr : rank.plane->memory());
    rank.plane.reset();
    rank.counters->As<DeviceCounters>()->error = 0;
  }
  ForgetKeys();
  RunAll([&](uint32_t rank) -> absl::Status {
    DataPlaneOptions options = PlaneOptions(rank);
    options.memory = memory[rank];
    ZS_ASSIGN_OR_RETURN(ranks_[rank].plane, TrainerDataPlane::Create(std::move(options)));
    return absl::OkStatus();
  });
}

void PlaneWorld::ForgetKeys() {
  absl::MutexLock lock(&mu_);
  keys_.clear();
}

std::vector<absl::Status> PlaneWorld::Run(const std::function<absl::Status(uint32_t)>& call) const {
  std::vector<absl::Status> results(options_.ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = call(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void PlaneWorld::RunAll(const std::function<absl::Status(uint32_t)>& call) const {
  const std::vector<absl::Status> results = Run(call);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    ASSERT_TRUE(results[rank].ok()) << "rank " << rank << ": " << results[rank];
  }
}

void PlaneWorld::Write(uint32_t rank, DeviceAddress to, const std::vector<std::byte>& bytes) {
  if (bytes.empty()) return;
  CudaStream& stream = *ranks_[rank].stream;
  absl::Status status = stream.CopyToDevice(to, bytes.data(), bytes.size());
  if (status.ok()) status = stream.Synchronize(options_.timeout);
  ASSERT_TRUE(status.ok()) << status;
}

std::vector<std::byte> PlaneWorld::Read(uint32_t rank, DeviceAddress from, uint64_t bytes) {
  std::vector<std::byte> copy(bytes);
  if (bytes == 0) return copy;
  CudaStream& stream = *ranks_[rank].stream;
  absl::Status status = stream.CopyToHost(copy.data(), from, bytes);
  if (status.ok()) status = stream.Synchronize(options_.timeout);
  EXPECT_TRUE(status.ok()) << status;
  return copy;
}

void PlaneWorld::SetParameters(uint32_t unit, const std::vector<std::byte>& bytes) {
  for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
    const GrainRange slice = layout_.slice(unit, rank);
    const uint64_t element = SizeOf(options_.dtype);
    const auto begin = bytes.begin() + static_cast<ptrdiff_t>(slice.first_element() * element);
    Write(rank, ranks_[rank].shared->address() + places_[rank][unit].parameters,
          {begin, begin + static_cast<ptrdiff_t>(slice.elements() * element)});
  }
}

std::vector<std::byte> PlaneWorld::Window(uint32_t rank, uint32_t unit) {
  return Read(rank, plane(rank).parameter_address(unit), layout_.units()[unit].bytes());
}

std::vector<std::byte> PlaneWorld::Accumulators(uint32_t unit) {
  std::vector<std::byte> all;
  for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
    const std::vector<std::byte> part =
        Read(rank, ranks_[rank].shared->address() + places_[rank][unit].accumulator,
             layout_.slice(unit, rank).elements() * SizeOf(options_.config.accumulator_dtype));
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

Presence PlaneWorld::PresenceOf(uint32_t rank, uint32_t unit) {
  const std::vector<std::byte> bytes =
      Read(rank, ranks_[rank].shared->address() + places_[rank][unit].presence, sizeof(Presence));
  Presence presence;
  std::memcpy(presence.data(), bytes.data(), bytes.size());
  return presence;
}

absl::Status PlaneWorld::Send(uint32_t rank, uint32_t unit, uint32_t micro_step,
                              const Gradient& gradient) {
  ZS_ASSIGN_OR_RETURN(const DeviceSlot slot, plane(rank).AcquireSlot(gradient.bytes.size()));
  Write(rank, slot.address, gradient.bytes);
  return plane(rank).Scatter({.unit = unit,
                              .micro_step = micro_step,
                              .slot = slot.offset,
                              .present = gradient.present,
                              .weight = gradient.weight,
                              .stream = ranks_[rank].stream->handle()});
}

absl::Status PlaneWorld::AwaitSummed(uint32_t rank, uint64_t attempt) {
  const absl::Time deadline = absl::Now() + options_.timeout;
  while (counters(rank).summed.load() < attempt) {
    ZS_RETURN_IF_ERROR(plane(rank).Poll());
    if (absl::Now() > deadline) return absl::DeadlineExceededError("the sums do not come");
    absl::SleepFor(absl::Microseconds(100));
  }
  return absl::OkStatus();
}

std::vector<std::byte> SumOnHost(const PlaneWorld& world, uint32_t unit,
                                 const std::vector<Gradients>& micro_steps,
                                 std::vector<std::byte> before) {
  const Unit& plan = world.layout().units()[unit];
  const DataPlaneConfig& config = world.options().config;
  const uint32_t ranks = world.options().ranks;
  Accumulator accumulator{.data = before.data(), .dtype = config.accumulator_dtype};
  for (size_t position = 0; position < plan.parameters.size(); ++position) {
    const ParameterPlace& place = world.layout().place(plan.parameters[position]);
    const uint64_t end = place.offset + place.elements;
    accumulator.mode = AccumulateMode::kStore;
    // With local sums: by rank, over the micro-steps.
    std::vector<std::vector<float>> own(ranks, std::vector<float>(plan.elements()));
    std::vector<char> any(ranks, 0);
    for (const Gradients& gradients : micro_steps) {
      std::vector<ReduceSource> sources(ranks);
      std::vector<char> present(ranks, 0);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        present[rank] = Has(gradients[rank], position);
        if (present[rank] == 0) continue;
        sources[rank] = {gradients[rank]->bytes.data(), plan.dtype, gradients[rank]->weight != 1.0F,
                         gradients[rank]->weight};
        if (!config.local_sums) continue;
        SumParameter(world, {sources[rank]}, {1},
                     {.data = own[rank].data(),
                      .mode = any[rank] != 0 ? AccumulateMode::kAdd : AccumulateMode::kStore},
                     place.offset, end);
        any[rank] = 1;
      }
      if (config.local_sums || std::ranges::count(present, 1) == 0) continue;
      SumParameter(world, sources, present, accumulator, place.offset, end);
      accumulator.mode = AccumulateMode::kAdd;
    }
    if (!config.local_sums || std::ranges::count(any, 1) == 0) continue;
    std::vector<ReduceSource> sums(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) sums[rank].data = own[rank].data();
    SumParameter(world, sums, any, accumulator, place.offset, end);
  }
  return before;
}

Presence PresenceOnHost(const PlaneWorld& world, uint32_t unit,
                        const std::vector<Gradients>& micro_steps) {
  Presence presence = {};
  for (size_t position = 0; position < world.layout().units()[unit].parameters.size(); ++position) {
    for (const Gradients& gradients : micro_steps) {
      for (const auto& gradient : gradients) {
        if (Has(gradient, position)) presence[position / 64] |= uint64_t{1} << position % 64;
      }
    }
  }
  return presence;
}

Gradient MakeGradient(const PlaneWorld& world, uint32_t unit, uint64_t seed, bool absent,
                      bool weighted) {
  const Unit& plan = world.layout().units()[unit];
  std::mt19937_64 random(seed * 1000003 + unit);
  std::vector<float> values(plan.elements());
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  // Signed zeros show who adds what is absent.
  for (size_t i = 0; i < values.size(); i += 7) values[i] = -0.0F;
  Gradient gradient;
  gradient.bytes.resize(plan.bytes());
  ConvertFromFloat(plan.dtype, values.data(), gradient.bytes.data(), values.size());
  if (absent) {
    gradient.present.assign((plan.parameters.size() + 7) / 8, '\0');
    for (size_t position = 0; position < plan.parameters.size(); ++position) {
      if (random() % 3 != 0) gradient.present[position / 8] |= static_cast<char>(1 << position % 8);
    }
  }
  if (weighted) gradient.weight = 1.0F + static_cast<float>(random() % 3);
  return gradient;
}

std::vector<std::byte> WithoutPadding(const PlaneWorld& world, uint32_t unit,
                                      const std::vector<std::byte>& bytes, size_t element_bytes) {
  std::vector<std::byte> data;
  for (const uint32_t parameter : world.layout().units()[unit].parameters) {
    const ParameterPlace& place = world.layout().place(parameter);
    const auto begin = bytes.begin() + static_cast<ptrdiff_t>(place.offset * element_bytes);
    data.insert(data.end(), begin, begin + static_cast<ptrdiff_t>(place.elements * element_bytes));
  }
  return data;
}

}  // namespace zeroshard
