// Checkpoints of jobs in one process, as the daemon has its workers write and read them.
#ifndef ZEROSHARD_TESTS_WORKER_STATE_CHECKPOINTS_H_
#define ZEROSHARD_TESTS_WORKER_STATE_CHECKPOINTS_H_

#include <cstdint>
#include <string>

#include "tests/fakes/local_job.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {

void SaveState(LocalJob& job, uint32_t workers, const TempDir& dir, const std::string& name);
// The first error, or nothing.
std::string RestoreState(LocalJob& job, uint32_t workers, const TempDir& dir,
                         const std::string& name, bool parameters_only = false);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_STATE_CHECKPOINTS_H_
