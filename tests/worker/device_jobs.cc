#include "tests/worker/device_jobs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

using Values = std::vector<std::vector<float>>;

// Several parameters share a grain, one is empty, one has many grains.
const std::vector<uint64_t> kSizes = {5, 7, 0, 1, 256, 513, 20000, 100, 3};
constexpr uint32_t kOverflow = 3;

// A device for each worker, unless the environment says otherwise.
[[maybe_unused]] const int kDevicesGiven =
    ::setenv("ZEROSHARD_FAKE_CUDA", "devices=4,memory=1G", /*overwrite=*/0);

const StateForm& FormOf(std::string_view name) {
  for (const StateForm& form : AllStateForms()) {
    if (form.name == name) return form;
  }
  ADD_FAILURE() << name;
  return AllStateForms().front();
}

Values RandomValues(uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Values values;
  for (uint64_t size : kSizes) {
    values.emplace_back(size);
    for (float& value : values.back()) value = uniform(random);
  }
  return values;
}

// In some steps a rank, or every rank, has no gradient for some parameters.
Values GradientsOf(uint32_t step, uint32_t micro, uint32_t rank) {
  Values gradients = RandomValues(1000 * step + 100 * micro + rank + 7);
  for (size_t p = 0; p < gradients.size(); ++p) {
    if ((step == 1 && p % 3 == 0) || (step == 2 && p % 2 == (rank + micro) % 2)) {
      gradients[p].clear();
    }
  }
  if (step == kOverflow && rank == 0 && micro == 0) {
    gradients[6][77] = std::numeric_limits<float>::infinity();
  }
  return gradients;
}

}  // namespace

std::string Describe(const DeviceCase& c) {
  return absl::StrCat(
      c.form, c.without_master ? " without master" : "", " stage ", c.stage, " ranks ", c.ranks,
      " micro-steps ", c.micro_steps, " tier ", model::v1::Tier_Name(c.tier), " ratio ", c.ratio,
      c.host_parameters   ? " parameters on the host"
      : c.nvme_parameters ? " parameters on nvme"
                          : "",
      " dtype ", model::v1::DType_Name(c.dtype), " lanes ", c.lanes, c.islands ? " islands" : "");
}

void PrintTo(const DeviceCase& c, std::ostream* out) { *out << Describe(c); }

DeviceJob::DeviceJob(const DeviceCase& c, Where where, const CudaShardOptions& device)
    : case_(c), where_(where), device_(device) {
  job_ = std::make_unique<LocalJob>(Options(where));
  plane_.Attach(*job_);
  if (where != Where::kProcesses) Put();
}

DeviceJob::DeviceJob(const DeviceJob& ended)
    : case_(ended.case_), where_(Where::kDevice), device_(ended.device_) {
  LocalJobOptions options = Options(where_);
  options.nvme_paths = {ended.directory_.path()};
  options.resume = true;
  job_ = std::make_unique<LocalJob>(options);
  plane_.Attach(*job_);
}

LocalJobOptions DeviceJob::Options(Where where) {
  const DeviceCase& c = case_;
  LocalJobOptions options;
  options.manifest = MakeManifest(kSizes, c.dtype);
  options.config = MakeConfig(c.stage, c.ranks, c.dtype);
  model::v1::EngineConfig& config = options.config;
  const StateForm& form = FormOf(c.form);
  config.set_optimizer(form.optimizer);
  config.clear_state_slots();
  for (const char* slot : form.slots) config.add_state_slots(slot);
  config.set_master_form(c.without_master ? model::v1::MASTER_FORM_NONE : form.master);
  config.set_rounding_seed(7);
  config.set_state_format(form.states);
  config.set_accumulator_dtype(c.accumulator);
  config.set_accumulation_steps(c.micro_steps);
  config.set_ranks_first(c.ranks_first);
  config.set_reduction_group(2);
  config.set_sub_group_elements(1024);
  config.set_gradient_clipping(0.5);
  config.set_collective_timeout_ms(60000);
  config.mutable_loss_scale()->set_dynamic(true);
  config.mutable_loss_scale()->set_initial(4);
  config.mutable_loss_scale()->set_window(2);
  config.mutable_loss_scale()->set_hysteresis(1);
  config.mutable_loss_scale()->set_minimum(1);
  options.lanes = c.lanes;
  if (where != Where::kHost) UseDevices(options, where);
  return options;
}

void DeviceJob::UseDevices(LocalJobOptions& options, Where where) {
  model::v1::EngineConfig& config = options.config;
  options.workers = case_.ranks;
  options.islands = case_.islands;
  options.in_processes = where == Where::kProcesses;
  if (case_.tier == model::v1::TIER_NVME || case_.nvme_parameters) {
    UseNvme(config, case_.ratio, case_.nvme_parameters);
    options.nvme_paths = {directory_.path()};
    if (case_.power) config.mutable_nvme()->set_durability(model::v1::DURABILITY_POWER);
  }
  config.set_data_plane(true);
  config.set_tiered(true);
  config.set_optimizer_tier(case_.tier);
  config.set_optimizer_ratio(case_.ratio);
  config.set_parameter_tier(case_.host_parameters   ? model::v1::TIER_HOST
                            : case_.nvme_parameters ? model::v1::TIER_NVME
                                                    : model::v1::TIER_GPU);
  config.set_window(case_.host_parameters ? model::v1::WINDOW_IN_PLACE : model::v1::WINDOW_COPY);
  config.set_gpu_mirror_steps(case_.mirror_steps);
  if (case_.nvme_parameters) {
    // Some stay gathered, one rests on the host.
    config.set_persistence_threshold(5);
    config.set_host_parameter_elements(300);
  }
  options.data_plane = &plane_;
  options.open_device = [this](JobMemory& memory) { return CudaShard::Open(memory, device_); };
}

void DeviceJob::Put(uint32_t seed) { job_->PutParameters(RandomValues(seed)); }

void DeviceJob::Scatter(uint32_t step) {
  for (uint32_t micro = 0; micro < case_.micro_steps; ++micro) {
    for (uint32_t rank = 0; rank < case_.ranks; ++rank) {
      job_->ScatterAll(rank, micro, GradientsOf(step, micro, rank));
    }
    job_->Run();
  }
}

void DeviceJob::Arrive() {
  for (uint32_t rank = 0; rank < case_.ranks; ++rank) job_->Step(rank, case_.micro_steps, 0.01);
  job_->Run();
}

void DeviceJob::Train(uint32_t from, uint32_t to) {
  for (uint32_t step = from; step < to; ++step) {
    Scatter(step);
    Arrive();
    for (uint32_t rank = 0; rank < case_.ranks; ++rank) {
      ASSERT_EQ(job_->result(rank).step, step + 1) << Describe(case_) << ": " << LastFailure();
      ASSERT_EQ(job_->result(rank).skipped, step == kOverflow ? 1u : 0u) << Describe(case_);
    }
  }
}

void DeviceJob::ExpectGathers(uint32_t rank, const std::function<void()>& meanwhile) {
  const Layout& layout = job_->layout();
  uint64_t at = job_->memory(rank).gradient_window(rank).size() -
                ParameterRingBytes(layout, job_->memory(rank).config());
  std::vector<uint64_t> requests;
  std::map<uint32_t, uint64_t> places;  // by unit
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    const UnitPlan& plan = job_->memory(rank).plan().unit(unit);
    trainer::v1::SessionRequest gather;
    gather.mutable_gather()->add_units(unit);
    gather.mutable_gather()->set_window_offset(plan.resident ? 0 : at);
    requests.push_back(job_->Send(rank, gather));
    if (plan.resident) continue;
    places[unit] = at;
    at += plan.shard.elements() * SizeOf(layout.units()[unit].dtype);
  }
  meanwhile();
  job_->Run();
  for (const uint64_t id : requests) EXPECT_TRUE(job_->Done(rank, id)) << LastFailure();
  EXPECT_GT(places.size(), 1u);
  for (const auto& [unit, place] : places) {
    std::vector<std::byte> shard(job_->memory(rank).plan().unit(unit).shard.elements() *
                                 SizeOf(layout.units()[unit].dtype));
    ASSERT_EQ(job_->engine(rank).shard().ReadParameters(unit, {shard}), absl::OkStatus());
    EXPECT_TRUE(std::equal(shard.begin(), shard.end(), job_->gradient_window(rank) + place))
        << "unit " << unit;
  }
}

void DeviceJob::Move(model::v1::Tier to, const std::vector<uint32_t>& units) {
  if (where_ == Where::kHost) return;
  internal::v1::MoveStates command;
  command.set_to(to);
  command.mutable_units()->Add(units.begin(), units.end());
  for (uint32_t w = 0; w < case_.ranks; ++w) job_->engine(w).OnMove(command);
}

void DeviceJob::NextGeneration() {
  plane_.Forget();
  const uint64_t dead = job_->next_generation();
  for (uint32_t w = 0; w < case_.ranks; ++w) job_->engine(w).OnDropAttempt(dead);
  for (uint32_t rank = 0; rank < case_.ranks; ++rank) {
    job_->failures(rank).clear();
    job_->Hello(rank, false);
  }
  job_->Run();
}

std::string DeviceJob::State() {
  const JobNumbers& numbers = job_->memory(0).board().numbers();
  return absl::StrCat(numbers.step, " ", numbers.updates, " ", numbers.loss_scale, " ",
                      numbers.grad_norm, "\n", job_->StateBytes());
}

std::string DeviceJob::LastFailure() {
  return job_->failures(0).empty() ? "" : job_->failures(0).back().message();
}

uint64_t DeviceJob::OnDevices() {
  uint64_t bytes = 0;
  for (uint32_t w = 0; w < case_.ranks; ++w) bytes += job_->engine(w).Stats().gpu_state_bytes();
  return bytes;
}

uint64_t DeviceJob::OnDrives() {
  uint64_t bytes = 0;
  for (uint32_t w = 0; w < case_.ranks; ++w) bytes += job_->engine(w).Stats().nvme_state_bytes();
  return bytes;
}

std::string TrainedOnHost(const DeviceCase& c, uint32_t steps) {
  DeviceJob job(c, DeviceJob::Where::kHost);
  job.Train(0, steps);
  return job.State();
}

}  // namespace zeroshard
