// Writes a job's parameters as one safetensors file.
#ifndef ZEROSHARD_WORKER_PARAMETER_EXPORT_H_
#define ZEROSHARD_WORKER_PARAMETER_EXPORT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/engine.h"

namespace zeroshard {

// Streams the parameters from the window into `fd` (open for writing, empty), unit by unit; a
// copied window holds at most one unit more for it. Returns the length of the file. Loop thread, at
// a step boundary.
absl::StatusOr<uint64_t> ExportParameters(Engine& engine, int fd);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_PARAMETER_EXPORT_H_
