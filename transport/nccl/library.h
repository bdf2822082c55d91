// NcclLibrary: the NCCL of this process, found at run time. Nothing links libnccl.
//
// A trainer has usually loaded NCCL already (PyTorch brings its own); two copies in one process
// would hold their buffers and threads twice and know nothing of each other's launches, so the
// loaded one is taken whatever its version is, and only where there is none libnccl.so.2 is opened.
// What a version lacks is seen from its symbols and from its number, never from the headers of this
// build.
//
// A value: copies are cheap, any thread may use one, and the library stays loaded until the process
// ends. docs/nccl.md has the rules of versions.
#ifndef ZEROSHARD_TRANSPORT_NCCL_LIBRARY_H_
#define ZEROSHARD_TRANSPORT_NCCL_LIBRARY_H_

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace zeroshard {

struct NcclApi;  // transport/nccl/api.h

// Names a communicator that is to be made: one rank gets it, the others are told it by the control
// plane. Bytes without meaning to us.
using NcclUniqueId = std::array<std::byte, 128>;

class NcclLibrary {
 public:
  // FailedPrecondition where no library is found (the message names every place tried) or it is
  // older than 2.14, the first with communicators that do not block.
  static absl::StatusOr<NcclLibrary> Load();

  // As NCCL_VERSION_CODE: 22809 is 2.28.9.
  int version() const { return version_; }
  // "NCCL 2.28.9, loaded before by this process (/usr/lib/libnccl.so.2)".
  const std::string& description() const { return description_; }

  // Buffers can be registered with a communicator (2.19), so that transfers need no staging copy.
  bool can_register() const;
  // A communicator can be split (2.18): hierarchical gathers need it.
  bool can_split() const;

  // For one rank of a communicator to be. Unavailable where the network of the bootstrap cannot be
  // used (NCCL_SOCKET_IFNAME).
  absl::StatusOr<NcclUniqueId> MakeUniqueId() const;

  const NcclApi& api() const { return *api_; }

 private:
  NcclLibrary(std::shared_ptr<const NcclApi> api, int version, std::string description)
      : api_(std::move(api)), version_(version), description_(std::move(description)) {}

  std::shared_ptr<const NcclApi> api_;
  int version_;
  std::string description_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_NCCL_LIBRARY_H_
