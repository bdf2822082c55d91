// Admission of a directory as an nvme_path: what it is, whether it will do, how to transfer.
//
// The files of the tier lie in the directory `zeroshard` beneath it, which belongs to the daemon's
// user and is made when it is missing; all access is beneath its descriptor. Table of what is
// refused: docs/nvme.md. Any thread.
#ifndef ZEROSHARD_STORAGE_NVME_PATH_H_
#define ZEROSHARD_STORAGE_NVME_PATH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "storage/file_system_kind.h"

namespace zeroshard {

struct NvmePathOptions {
  bool allow_network_path = false;
};

struct NvmePath {
  std::string path;                   // as the operator gave it
  UniqueFd directory;                 // of <path>/zeroshard
  std::string filesystem;             // "ext4"; "0x1234" for one without a name here
  bool direct = false;                // O_DIRECT works with alignment to 4096
  std::vector<std::string> warnings;  // for the operator, each a sentence
};

// Looks at the directory and tries a small write, read and removal. InvalidArgument for a path that
// is empty, relative, not a directory, on a network file system, or wants an alignment above 4096;
// NotFound, PermissionDenied, FailedPrecondition (read-only), ResourceExhausted (full), DataLoss
// (what was written does not read back), each with the path.
absl::StatusOr<NvmePath> AdmitNvmePath(const std::string& path, const NvmePathOptions& options);

// The lock of the daemon that uses the path, held while the descriptor lives. FailedPrecondition
// when another one holds it.
absl::StatusOr<UniqueFd> LockNvmePath(const NvmePath& path);

// What to warn of for a path on such a file system, or nothing; InvalidArgument for a network one
// that is not allowed. Part of AdmitNvmePath.
absl::StatusOr<std::string> JudgeFileSystem(const std::string& path, const FileSystemKind& kind,
                                            const NvmePathOptions& options);

// Zeroed memory aligned for O_DIRECT.
class DirectBuffer {
 public:
  explicit DirectBuffer(size_t bytes);
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t bytes_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_NVME_PATH_H_
