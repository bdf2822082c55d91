// LedgerLines: the memory of a job by kind of state and holder, held against the ZeRO formula.
//
// Let P be the elements of the parameters, T those of the trainable ones, N the workers, G the
// bytes of an accumulator element. A state's line counts data only; the slices' padding, the
// windows beyond the data and the records have lines of their own, so that all lines of the host
// tier add up to the memory of the regions and staging, and those of the NVMe tier to its files.
// States are listed where they rest at first; some may be moved later. Pure.

#ifndef ZEROSHARD_SERVER_LEDGER_LINES_H_
#define ZEROSHARD_SERVER_LEDGER_LINES_H_

#include <vector>

#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "server/planner.h"

namespace zeroshard {

// `plan` with everything but its ledger.
absl::StatusOr<std::vector<model::v1::LedgerLine>> LedgerLines(const JobPlan& plan);

// Bytes of memory that one worker has for staging.
uint64_t StagingBytes(const JobPlan& plan, const NvmePlan& nvme);

// Bytes of memory that an island's parameter window may take: all of it when the parameters at rest
// lie in it, else the resident units and max_live_elements of the others. With a data plane it is
// for exports only, and no unit is resident.
uint64_t WindowMemory(const Layout& layout, const model::v1::EngineConfig& config);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_LEDGER_LINES_H_
