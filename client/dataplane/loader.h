// Opens libzeroshard-dataplane.so: the code that knows CUDA and NCCL is only loaded by trainers of
// jobs on GPUs. Any thread; the library stays loaded.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_LOADER_H_
#define ZEROSHARD_CLIENT_DATAPLANE_LOADER_H_

#include "absl/status/statusor.h"
#include "client/dataplane/data_plane.h"

namespace zeroshard {

// The file $ZEROSHARD_DATAPLANE, else libzeroshard-dataplane.so beside the program or shared
// library that this code is in, else where the dynamic linker looks. FailedPrecondition where there
// is none, or one of another version: the message names what was tried.
absl::StatusOr<const DataPlaneLibrary*> LoadDataPlaneLibrary();

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_LOADER_H_
