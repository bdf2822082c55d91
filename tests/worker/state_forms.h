// Jobs of every optimizer with every form of master and states, for tests of the engine.
#ifndef ZEROSHARD_TESTS_WORKER_STATE_FORMS_H_
#define ZEROSHARD_TESTS_WORKER_STATE_FORMS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/fakes/local_job.h"

namespace zeroshard {

struct StateForm {
  const char* name;
  model::v1::OptimizerKind optimizer;
  std::vector<const char*> slots;
  model::v1::MasterForm master;
  model::v1::StateFormat states;
};
std::span<const StateForm> AllStateForms();

struct StateVariant {
  uint32_t stage = 2;
  uint32_t workers = 1;
  uint32_t lanes = 1;
  bool copy = false;
  bool islands = false;
  uint64_t seed = 7;  // of stochastic rounding
  // The NVMe tier: where its files lie, how much of the states is there, and whether parameters.
  std::vector<std::string> nvme_paths = {};
  double ratio = 1;
  bool parameters = false;
  model::v1::Durability durability = model::v1::DURABILITY_PROCESS;
};

inline constexpr uint32_t kStateRanks = 2;

// bf16 parameters, several of them in one grain, one empty, one of many grains.
LocalJobOptions StateOptions(const StateForm& form, const StateVariant& v);
// A new job whose parameters are there.
std::unique_ptr<LocalJob> StartStateJob(const StateForm& form, const StateVariant& v);
std::unique_ptr<LocalJob> StartStateJob(const LocalJobOptions& options);
// Scatters the gradients of a step; in some steps a rank, or every rank, has none for some
// parameters.
void ScatterStep(LocalJob& job, uint32_t step);
// Trains steps [from, to).
void TrainSteps(LocalJob& job, uint32_t from, uint32_t to);
// Changes a byte in every slot, under a job's only path, of up to so many images of parameters of a
// worker; how many images that were.
size_t DamageParameters(LocalJob& job, uint32_t worker, const std::string& path, size_t images);
// The rank asks for all units; the request's id.
uint64_t GatherAll(LocalJob& job, uint32_t rank);
// All parameters, as an island's window shows them.
std::vector<float> WindowOf(const LocalJob& job, uint32_t island);
// All states of a new job after `steps` steps.
std::string TrainedStates(const StateForm& form, const StateVariant& v, uint32_t steps);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_STATE_FORMS_H_
