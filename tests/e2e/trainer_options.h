// What a deterministic trainer is told on its command line, and what follows from it.
#ifndef ZEROSHARD_TESTS_E2E_TRAINER_OPTIONS_H_
#define ZEROSHARD_TESTS_E2E_TRAINER_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session.h"

namespace zeroshard {

struct TrainerOptions {
  std::string socket;
  std::string job = "deterministic";
  uint32_t rank = 0;
  uint32_t ranks = 1;
  uint32_t local_ranks = 0;
  uint32_t stage = 3;
  uint64_t steps = 5;
  uint32_t micro_steps = 1;
  std::string dtype = "fp32";
  std::string optimizer = "AdamW";
  std::vector<uint64_t> sizes = {40000, 513, 7, 0, 1, 20000};
  std::vector<uint32_t> frozen;  // parameters that are not trained
  std::string config_extra = "{}";
  uint64_t timeout_ms = 60000;  // of the attach
  bool absent = false;          // some parameters have no gradient now and then
  bool weighted = false;        // micro-steps count unequally
  bool keep = false;            // the job outlives its last rank
  bool progress = false;        // a line on stdout after each step
  bool linger = false;          // wait for the end of stdin before leaving
  bool one_by_one = false;
  uint64_t pause_ms = 0;  // after each step
  int64_t swap_at = -1;   // the step in which this rank gathers its units in reverse
  uint64_t seed = 1;
  int64_t cuda = -2;   // the GPU; -1: the worker's, -2: none
  uint32_t lives = 1;  // generations in which this process may train (GPUs)
  std::string save;
  std::string export_name;
  std::string dump;
};

// Exits the process on a wrong command line, as CLI11 does.
TrainerOptions ParseTrainerOptions(int argc, char** argv);

// The manifest, the groups and the text of the ds_config. InvalidArgument for wrong values.
absl::StatusOr<AttachOptions> ToAttachOptions(const TrainerOptions& options);

// The hyperparameters of step `step` (from 0).
std::vector<GroupHyperparameters> GroupsOfStep(const TrainerOptions& options, uint64_t step);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_E2E_TRAINER_OPTIONS_H_
