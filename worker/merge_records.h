// The two-state merge records of the board: how far a unit is summed, and what is present in the
// sum.
#ifndef ZEROSHARD_WORKER_MERGE_RECORDS_H_
#define ZEROSHARD_WORKER_MERGE_RECORDS_H_

#include "storage/board.h"

namespace zeroshard {

// The presence that `record` holds for the attempt of `tag`; nothing is present at its first
// micro-step.
Presence PresenceBefore(const MergeRecord& record, Tag tag);

// Makes `tag` with `present` the record's state. A process that dies meanwhile leaves the old one.
void AdvanceRecord(MergeRecord& record, Tag tag, const Presence& present);

// The micro-step of `attempt` that comes next.
Tag NextTag(const MergeRecord& record, uint64_t attempt);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_MERGE_RECORDS_H_
