#include "client/cli/state_forms.h"

namespace zeroshard {
namespace {

using model::v1::EngineConfig;

uint32_t BytesOf(model::v1::DType dtype) { return dtype == model::v1::DTYPE_FLOAT32 ? 4 : 2; }

std::string OptimizerName(model::v1::OptimizerKind kind) {
  switch (kind) {
    case model::v1::OPTIMIZER_ADAMW:
      return "AdamW";
    case model::v1::OPTIMIZER_ADAM:
      return "Adam";
    case model::v1::OPTIMIZER_SGD:
      return "SGD";
    case model::v1::OPTIMIZER_ADAGRAD:
      return "Adagrad";
    case model::v1::OPTIMIZER_LION:
      return "Lion";
    default:
      return "none";
  }
}

struct StateName {
  const char* name;
  uint32_t bytes;
};
StateName StateNameOf(model::v1::StateFormat format) {
  switch (format) {
    case model::v1::STATE_FORMAT_BFLOAT16:
      return {"bf16", 2};
    case model::v1::STATE_FORMAT_INT8:
      return {"int8", 1};
    default:
      return {"fp32", 4};
  }
}

// Stage 0, and a job whose states can be on the NVMe tier or on GPUs, hold the split master as one
// of 32 bits, with the same values; and where there is no master, a tiered one a copy of the
// parameter.
uint32_t MasterBytes(model::v1::MasterForm form, const EngineConfig& config) {
  if (form == model::v1::MASTER_FORM_NONE) return config.tiered() ? 2 : 0;
  const bool whole = config.stage() == 0 || config.tiered();
  return form == model::v1::MASTER_FORM_SPLIT && !whole ? 2 : 4;
}

}  // namespace

StateForms StateFormsOf(const EngineConfig& config) {
  StateForms forms;
  forms.optimizer = OptimizerName(config.optimizer());
  forms.parameter = BytesOf(config.compute_dtype());
  forms.states = "-";
  forms.master = "-";
  if (config.optimizer() == model::v1::OPTIMIZER_NONE) return forms;
  forms.gradient = BytesOf(config.accumulator_dtype());
  uint32_t states = 0;
  if (config.state_slots_size() > 0) {
    const StateName name = StateNameOf(config.state_format());
    forms.states = name.name;
    states = name.bytes * static_cast<uint32_t>(config.state_slots_size());
  }
  if (config.compute_dtype() == model::v1::DTYPE_FLOAT32) {
    // At stage 0 every rank reads its own copy, and the master is another.
    forms.master = config.tiered() ? "fp32" : "the parameter";
    forms.optimizer_bytes = states + (config.stage() == 0 || config.tiered() ? 4 : 0);
    return forms;
  }
  const auto with = [&](model::v1::MasterForm form) { return states + MasterBytes(form, config); };
  switch (config.master_form()) {
    case model::v1::MASTER_FORM_SPLIT:
      forms.master = config.tiered() ? "fp32" : "split";
      break;
    case model::v1::MASTER_FORM_NONE:
      forms.master = config.tiered() ? "bf16" : "none";
      break;
    default:
      forms.master = "fp32";
  }
  forms.optimizer_bytes = with(config.master_form());
  forms.with_fp32 = with(model::v1::MASTER_FORM_FLOAT32);
  if (config.compute_dtype() == model::v1::DTYPE_BFLOAT16 && !config.tiered()) {
    forms.with_split = with(model::v1::MASTER_FORM_SPLIT);
  }
  return forms;
}

}  // namespace zeroshard
