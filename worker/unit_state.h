// UnitState: the master and the optimizer states of one unit in one worker's partition, as the
// update's kernels, the undo records, puts and checkpoints see them.
//
// Pointers into mapped regions, constant after the worker has started; the memory is the server's.
// Every pointer is that of the unit's element 0 (or block 0), which may lie outside the slice:
// index within the slice only (of what lies in an image: within the chunk only).
#ifndef ZEROSHARD_WORKER_UNIT_STATE_H_
#define ZEROSHARD_WORKER_UNIT_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "storage/block_table.h"
#include "storage/chunk_image.h"
#include "storage/partition.h"
#include "storage/record_type.h"
#include "storage/undo_area.h"
#include "worker/job_memory.h"
#include "worker/optim/kernels.h"

namespace zeroshard {

struct UnitState {
  // All but grad and out, which change from step to step.
  UpdateArrays arrays;
  uint32_t slots = 0;
  // 8-bit states only.
  std::shared_ptr<const BlockTable> blocks = std::make_shared<const BlockTable>();
};

// Of a unit that has an optimizer.
UnitState MakeUnitState(const JobMemory& memory, uint32_t unit);

// The same of one chunk, whose arrays lie in an image of the NVMe tier.
UnitState StateInImage(const UnitState& state, const ChunkPlan& chunk, const ChunkShape& shape,
                       std::byte* image);

// What the update changes in place in one chunk.
UndoChunk UndoOfUpdate(const UnitState& state, const ChunkPlan& chunk);

// The master of the elements [begin, end) after the parameter was put: the values, except where
// they are the rounded master already (whoever changes one parameter puts its neighbours in the
// grain, too). `values`: of element begin, in the unit's `dtype`. Call it before the parameter at
// rest changes.
void PutMaster(const UnitState& state, DType dtype, uint64_t begin, uint64_t end,
               const std::byte* values);

// Of a master that lies beside its parameters, or in an image: the parameters of elements [begin,
// begin + elements), each of them the rounded master.
void ParametersOfMaster(const UnitState& state, uint64_t begin, uint64_t elements,
                        std::byte* parameters);

// A state array as a checkpoint has it; made from what lies in memory where the two differ.
struct StateArray {
  enum class Source : uint8_t {
    kMemory,       // `bytes` are it
    kSplitMaster,  // fp32, joined from the halves
    kScales,       // of state `slot`, spread to their places in the grain
  };
  std::string kind;
  RecordType type = DType::kFloat32;
  GrainRange grains;
  std::span<std::byte> bytes = {};
  Source source = Source::kMemory;
  uint32_t slot = 0;

  uint64_t size() const { return grains.size() * type.grain_bytes(); }
};

// Adds the optimizer's arrays of `grains` to `arrays`: the master (with `master`), then the states
// by the names that the configuration gives them.
void AppendStateArrays(const UnitState& state, std::span<const std::string> names, bool master,
                       GrainRange grains, std::vector<StateArray>& arrays);

// Copies the part `grains` of an array out or in. In: of a split master the low halves only, since
// the high ones are the parameter.
void ReadStateArray(const Layout& layout, uint32_t unit, const UnitState& state,
                    const StateArray& array, GrainRange grains, std::span<std::byte> out);
void WriteStateArray(const Layout& layout, uint32_t unit, const UnitState& state,
                     const StateArray& array, GrainRange grains, std::span<const std::byte> in);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_UNIT_STATE_H_
