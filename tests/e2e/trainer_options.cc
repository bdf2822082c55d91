#include "tests/e2e/trainer_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

using nlohmann::json;

constexpr double kLearningRate = 0.01;

absl::StatusOr<std::string> ConfigText(const TrainerOptions& options) {
  json config = {
      {"train_micro_batch_size_per_gpu", 1},
      {"gradient_accumulation_steps", options.micro_steps},
      {"gradient_clipping", 0},
      {"optimizer", {{"type", options.optimizer}, {"params", {{"lr", kLearningRate}}}}},
      {"zero_optimization", {{"stage", options.stage}}},
      {"zeroshard", {{"user_state_bytes", 4096}}},
  };
  if (options.stage == 3) {
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 600;
  }
  if (options.dtype == "bf16") config["bf16"] = {{"enabled", true}};
  if (options.dtype == "fp16") config["fp16"] = {{"enabled", true}, {"hysteresis", 1}};
  if (options.optimizer == "SGD") config["optimizer"]["params"]["momentum"] = 0.9;
  const json extra = json::parse(options.config_extra, nullptr, /*allow_exceptions=*/false);
  if (!extra.is_object()) return absl::InvalidArgumentError("--config-extra: not a JSON object");
  config.merge_patch(extra);
  return config.dump();
}

}  // namespace

TrainerOptions ParseTrainerOptions(int argc, char** argv) {
  TrainerOptions options;
  CLI::App app("One rank of a job whose gradients are a function of step, rank and parameters.");
  app.add_option("--socket", options.socket, "the daemon's socket");
  app.add_option("--job", options.job, "name of the job");
  app.add_option("--rank", options.rank, "this rank");
  app.add_option("--ranks", options.ranks, "ranks of the job");
  app.add_option("--local-ranks", options.local_ranks, "those of this daemon; 0: all");
  app.add_option("--stage", options.stage, "ZeRO stage")->check(CLI::Range(0, 3));
  app.add_option("--steps", options.steps, "the step at which to stop");
  app.add_option("--micro-steps", options.micro_steps, "micro-steps of a step");
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--optimizer", options.optimizer)
      ->check(CLI::IsMember({"AdamW", "Adam", "SGD", "Adagrad", "Lion", "AdamW8bit"}));
  app.add_option("--sizes", options.sizes, "elements of each parameter")->delimiter(',');
  app.add_option("--frozen", options.frozen, "parameters that are not trained")->delimiter(',');
  app.add_option("--config-extra", options.config_extra, "JSON merged into the ds_config");
  app.add_option("--timeout-ms", options.timeout_ms, "of the attach");
  app.add_flag("--absent", options.absent, "some parameters have no gradient now and then");
  app.add_flag("--weighted", options.weighted, "micro-steps have weights");
  app.add_flag("--keep", options.keep, "leave the job in the daemon");
  app.add_flag("--progress", options.progress, "a line after each step");
  app.add_flag("--linger", options.linger, "after the last line, leave when stdin ends");
  app.add_flag("--one-by-one", options.one_by_one, "read the parameters at the end unit by unit");
  app.add_option("--pause-ms", options.pause_ms, "after each step");
  app.add_option("--swap-at", options.swap_at, "step in which units are gathered in reverse");
  app.add_option("--seed", options.seed, "of parameters and gradients");
  app.add_option("--cuda", options.cuda, "train on this GPU; -1: on the worker's");
  app.add_option("--lives", options.lives, "on GPUs: attach again after an aborted step");
  app.add_option("--save", options.save, "checkpoint at the end (rank 0)");
  app.add_option("--export", options.export_name, "safetensors file at the end (rank 0)");
  app.add_option("--dump", options.dump, "file for the parameters as fp32");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

absl::StatusOr<AttachOptions> ToAttachOptions(const TrainerOptions& options) {
  AttachOptions attach{.socket = options.socket,
                       .job = options.job,
                       .rank = options.rank,
                       .world_size = options.ranks,
                       .local_ranks = options.local_ranks,
                       .groups = GroupsOfStep(options, 0),
                       .timeout = absl::Milliseconds(options.timeout_ms)};
  if (options.cuda >= kWorkersDevice) attach.cuda_device = static_cast<int>(options.cuda);
  ZS_ASSIGN_OR_RETURN(const DType dtype, ParseDType(options.dtype));
  for (uint32_t i = 0; i < options.sizes.size(); ++i) {
    const bool frozen =
        std::find(options.frozen.begin(), options.frozen.end(), i) != options.frozen.end();
    ParameterSpec spec{.name = absl::StrCat("p", i),
                       .aliases = {},
                       .shape = {options.sizes[i]},
                       .dtype = dtype,
                       .trainable = !frozen,
                       .group = i % 2,
                       .module = absl::StrCat("m", i)};
    if (options.sizes[i] == 1) spec.shape.clear();
    attach.parameters.push_back(std::move(spec));
  }
  ZS_ASSIGN_OR_RETURN(attach.ds_config, ConfigText(options));
  return attach;
}

std::vector<GroupHyperparameters> GroupsOfStep(const TrainerOptions& options, uint64_t step) {
  const double lr = kLearningRate / (1.0 + 0.125 * static_cast<double>(step));
  GroupHyperparameters first{.lr = lr, .weight_decay = 0.01};
  if (options.optimizer == "SGD") first.momentum = 0.9;
  GroupHyperparameters second = first;
  second.weight_decay = 0.0;
  second.lr = lr / 2;
  return {first, second};
}

}  // namespace zeroshard
