#include "worker/merge_records.h"

#include <atomic>

#include "base/fault_point.h"

namespace zeroshard {

Presence PresenceBefore(const MergeRecord& record, Tag tag) {
  const Tag done = record.tag.load(std::memory_order_acquire);
  if (AttemptOf(done) != AttemptOf(tag)) return {};
  return record.states[record.states[0].tag == done ? 0 : 1].present;
}

void AdvanceRecord(MergeRecord& record, Tag tag, const Presence& present) {
  const Tag done = record.tag.load(std::memory_order_acquire);
  MergeRecord::State& state = record.states[record.states[0].tag == done ? 1 : 0];
  state.tag = 0;
  state.present = present;
  std::atomic_thread_fence(std::memory_order_release);
  state.tag = tag;
  ZS_FAULT_POINT("worker.merge.before_record");
  record.tag.store(tag, std::memory_order_release);
  ZS_FAULT_POINT("worker.merge.after_record");
}

Tag NextTag(const MergeRecord& record, uint64_t attempt) {
  const Tag done = record.tag.load(std::memory_order_acquire);
  return AttemptOf(done) == attempt ? done + 1 : MakeTag(attempt, 0);
}

}  // namespace zeroshard
