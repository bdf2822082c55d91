// Runs an in-place pass so that a killed process's successor finishes it with the same bits
// (protocol and conditions: storage/undo_area.h).
//
// Used for the optimizer update (arrays: master and states) and for `acc += sum` of micro-steps
// after the first (array: the accumulator). Passes that only store what they computed from other
// memory need no protection.
//
// Example:
//   area.Recover(arrays_of_dead_chunk);          // once, after adopting the region
//   const ProtectedPass pass{area, {.tag = step_tag, .op = kApply}};
//   RunProtected(pass, chunks, parallel_for, arrays_of_chunk,
//                [&](uint32_t chunk, uint64_t begin, uint64_t end) { Update(chunk, begin, end); });
#ifndef ZEROSHARD_WORKER_PROTECTED_PASS_H_
#define ZEROSHARD_WORKER_PROTECTED_PASS_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "absl/types/span.h"
#include "device/cpu/stream_copy.h"
#include "storage/undo_area.h"
#include "worker/undo_copy.h"

namespace zeroshard {

// Where a test can stop a lane.
enum class ProtectedPoint : uint8_t {
  kBeforeRecord,
  kAfterRecord,
  kAfterPosition,
  kAfterUpdate,
  kAfterDone
};

struct NoProbe {
  void operator()(ProtectedPoint) const {}
};

struct ProtectedPass {
  UndoArea area;
  UndoKey key;
};

namespace protected_internal {

// Keeps the compiler from moving stores across; see undo_area.h for why the processor needs
// nothing.
inline void CompilerFence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// The copy loop for this processor.
CopyFn BestUndoCopy();

// The elements [begin, begin + elements) of a chunk, and the record they go to.
struct Group {
  uint64_t sequence = 0;
  uint32_t elements = 0;
  uint64_t begin = 0;
};

// Writes what is the same for all records of a chunk into those that are not live.
inline void WriteConstants(LaneArea& area, const UndoKey& key, const UndoChunk& chunk,
                           uint32_t chunk_index) {
  const uint64_t live = area.header.position.load(std::memory_order_relaxed);
  for (uint64_t i = 0; i < 2; ++i) {
    if (live != 0 && live % 2 == i) continue;  // of this chunk, see CheckedStart
    LaneRecord& record = area.records[i];
    record.tag = key.tag;
    record.op = key.op;
    record.chunk = chunk_index;
    record.array_count = chunk.array_count;
    for (uint32_t k = 0; k < chunk.array_count; ++k) {
      record.element_bytes[k] = static_cast<uint16_t>(chunk.arrays[k].element_bytes);
    }
  }
}

// The arrays of a chunk as the copy takes them: those with a value an element that come first.
struct CopySources {
  explicit CopySources(const UndoChunk& chunk) {
    while (count < chunk.array_count && chunk.arrays[count].slots == nullptr) {
      const UndoArray& array = chunk.arrays[count];
      sources[count++] = {reinterpret_cast<const unsigned char*>(array.data), array.element_bytes};
    }
  }
  uint32_t count = 0;
  CopySource sources[kMaxUndoArrays];
};

// Copies what the group is about to change into the record.
inline void WriteRecord(LaneRecord& record, const UndoChunk& chunk, const CopySources& sources,
                        const Group& group, CopyFn copy) {
  record.sequence = group.sequence;
  record.begin = group.begin;
  record.elements = group.elements;
  auto* payload = copy(reinterpret_cast<unsigned char*>(record.payload), sources.sources,
                       sources.count, group.begin, group.elements);
  for (uint32_t i = sources.count; i < chunk.array_count; ++i) {
    const std::span<std::byte> bytes = UndoBytes(chunk, i, group.begin, group.elements);
    std::memcpy(payload, bytes.data(), bytes.size());
    payload += bytes.size();
  }
}

// Aborts the process (a bug of ours) when the chunk cannot be protected or the lane is in the
// middle of another chunk. Returns the first element to work on.
uint64_t CheckedStart(const ProtectedPass& pass, uint32_t lane, uint32_t chunk_index,
                      const UndoChunk& chunk);

}  // namespace protected_internal

// Works on one chunk on one lane, from where the lane's live record stands or from the start; does
// nothing when the chunk is done under this tag. `update(begin, end)` updates the elements [begin,
// end) of the chunk.
template <class Update, class Probe = NoProbe>
void RunProtectedChunk(const ProtectedPass& pass, uint32_t lane, uint32_t chunk_index,
                       const UndoChunk& chunk, Update&& update, Probe&& probe = Probe()) {
  namespace internal = protected_internal;
  if (pass.area.IsDone(chunk_index, pass.key.tag)) return;
  internal::Group group;
  group.begin = internal::CheckedStart(pass, lane, chunk_index, chunk);
  LaneArea& area = pass.area.lane(lane);
  internal::WriteConstants(area, pass.key, chunk, chunk_index);
  group.sequence = area.header.position.load(std::memory_order_relaxed);
  const internal::CopyFn copy = internal::BestUndoCopy();
  const internal::CopySources sources(chunk);
  while (group.begin < chunk.elements) {
    const uint64_t left = chunk.elements - group.begin;
    group.elements =
        left < chunk.group_elements ? static_cast<uint32_t>(left) : chunk.group_elements;
    ++group.sequence;
    probe(ProtectedPoint::kBeforeRecord);
    internal::WriteRecord(area.records[group.sequence % 2], chunk, sources, group, copy);
    probe(ProtectedPoint::kAfterRecord);
    internal::CompilerFence();
    area.header.position.store(group.sequence, std::memory_order_release);
    internal::CompilerFence();
    probe(ProtectedPoint::kAfterPosition);
    update(group.begin, group.begin + group.elements);
    probe(ProtectedPoint::kAfterUpdate);
    group.begin += group.elements;
  }
  internal::CompilerFence();
  StreamFence();
  pass.area.done(chunk_index).store(pass.key.tag, std::memory_order_release);
  internal::CompilerFence();
  probe(ProtectedPoint::kAfterDone);
  area.header.position.store(0, std::memory_order_release);
  internal::CompilerFence();
}

// Runs the pass over `chunks` (distinct). First every chunk that a predecessor left in the middle
// is finished on its own lane, then the rest is shared out; so the number of lanes and their
// assignment may differ from the predecessor's. `parallel_for(n, fn)` calls fn(item, lane), lane <
// lanes <= area.lanes(), as ThreadPool::ParallelFor does. `arrays_of(chunk)` returns the UndoChunk;
// `update(chunk, begin, end)`, or `update(lane, chunk, begin, end)`, updates elements of that
// chunk; no two calls of one lane run at the same time.
template <class ParallelFor, class ArraysOf, class Update, class Probe = NoProbe>
void RunProtected(const ProtectedPass& pass, absl::Span<const uint32_t> chunks,
                  ParallelFor&& parallel_for, ArraysOf&& arrays_of, Update&& update,
                  Probe&& probe = Probe()) {
  auto run = [&](uint32_t lane, uint32_t chunk) {
    RunProtectedChunk(
        pass, lane, chunk, arrays_of(chunk),
        [&](uint64_t begin, uint64_t end) {
          if constexpr (std::is_invocable_v<Update&, uint32_t, uint32_t, uint64_t, uint64_t>) {
            update(lane, chunk, begin, end);
          } else {
            update(chunk, begin, end);
          }
        },
        probe);
  };
  std::vector<UndoResume> torn;
  for (uint32_t lane = 0; lane < pass.area.lanes(); ++lane) {
    const auto in_flight = pass.area.InFlight(lane);
    if (in_flight.has_value() && in_flight->key == pass.key) torn.push_back(*in_flight);
  }
  parallel_for(torn.size(), [&](size_t item, int) { run(torn[item].lane, torn[item].chunk); });
  parallel_for(chunks.size(),
               [&](size_t item, int lane) { run(static_cast<uint32_t>(lane), chunks[item]); });
}

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_PROTECTED_PASS_H_
