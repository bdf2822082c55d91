// How a job holds master parameters and optimizer states, in bytes a parameter: the terms K and G
// of the ledger. Pure.
#ifndef ZEROSHARD_CLIENT_CLI_STATE_FORMS_H_
#define ZEROSHARD_CLIENT_CLI_STATE_FORMS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "proto/model.pb.h"

namespace zeroshard {

// Bytes are those of one trainable parameter of the job's compute type, before it is divided over
// the workers; scales of 8-bit states (1/64 of a byte a state) are left out.
struct StateForms {
  std::string optimizer;         // "AdamW"; "none" for a job without updates
  std::string master;            // "fp32", "split", "none", or "the parameter" in an fp32 job;
                                 // "fp32" where states can be on the NVMe tier
  std::string states;            // "fp32", "bf16", "int8"; "-" without states
  uint32_t parameter = 0;        // of the parameter itself
  uint32_t gradient = 0;         // G: its gradient accumulator
  uint32_t optimizer_bytes = 0;  // K: master beside the parameter, and states
  // K with the one and the other form of master; nothing where the job cannot have it.
  std::optional<uint32_t> with_split;
  std::optional<uint32_t> with_fp32;
};

StateForms StateFormsOf(const model::v1::EngineConfig& config);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_CLI_STATE_FORMS_H_
