// What a worker does with files: its shard of a checkpoint, and the export of parameters.
//
// Runs on the loop thread between two rounds of the engine, so states stand still while it works; a
// job steps on when it is done.
#ifndef ZEROSHARD_WORKER_SHARD_FILES_H_
#define ZEROSHARD_WORKER_SHARD_FILES_H_

#include <vector>

#include "base/unique_fd.h"
#include "proto/internal.pb.h"
#include "worker/engine.h"

namespace zeroshard {

// Answers SaveShard, RestoreShard (descriptor: the checkpoint's directory) and ExportFile
// (descriptor: a file to write). Errors lie in the answer: FailedPrecondition while a step is being
// applied, and what the files give.
internal::v1::ShardDone RunShardCommand(Engine& engine, const internal::v1::ToWorker& command,
                                        const std::vector<UniqueFd>& fds);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_SHARD_FILES_H_
