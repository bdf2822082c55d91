// What kind of file system a directory lies on: local, across a network, or in memory. Any thread.
#ifndef ZEROSHARD_STORAGE_FILE_SYSTEM_KIND_H_
#define ZEROSHARD_STORAGE_FILE_SYSTEM_KIND_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace zeroshard {

enum class FileSystemPlace : uint8_t { kLocal, kNetwork, kMemory };

struct FileSystemKind {
  FileSystemPlace place = FileSystemPlace::kLocal;
  std::string name;  // "nfs", "tmpfs"; local ones without an entry of their own: "type 0x1234"
};

// By the number that statfs(2) returns in f_type. FUSE counts as a network: what is behind it
// cannot be known, and it is often one.
FileSystemKind FileSystemKindOf(uint64_t type);

// An error of statfs(2), which names the path.
absl::StatusOr<FileSystemKind> FileSystemKindAt(const std::string& path);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_FILE_SYSTEM_KIND_H_
