#include "storage/file_system_kind.h"

#include <sys/vfs.h>

#include <cerrno>

#include "absl/strings/str_format.h"
#include "base/status.h"

namespace zeroshard {
namespace {

struct Entry {
  uint64_t type;
  FileSystemPlace place;
  const char* name;
};

// From statfs(2), linux/magic.h, and the sources of Lustre, GPFS, BeeGFS and WekaFS.
constexpr Entry kEntries[] = {
    {0x6969, FileSystemPlace::kNetwork, "nfs"},
    {0x517b, FileSystemPlace::kNetwork, "smb"},
    {0xff534d42, FileSystemPlace::kNetwork, "cifs"},
    {0xfe534d42, FileSystemPlace::kNetwork, "smb2"},
    {0x00c36400, FileSystemPlace::kNetwork, "ceph"},
    {0x01021997, FileSystemPlace::kNetwork, "9p"},
    {0x5346414f, FileSystemPlace::kNetwork, "afs"},
    {0x6b414653, FileSystemPlace::kNetwork, "kafs"},
    {0x73757245, FileSystemPlace::kNetwork, "coda"},
    {0x564c, FileSystemPlace::kNetwork, "ncp"},
    {0x0bd00bd0, FileSystemPlace::kNetwork, "lustre"},
    {0x47504653, FileSystemPlace::kNetwork, "gpfs"},
    {0x19830326, FileSystemPlace::kNetwork, "beegfs"},
    {0x7461636f, FileSystemPlace::kNetwork, "ocfs2"},
    {0x01161970, FileSystemPlace::kNetwork, "gfs2"},
    {0x65735546, FileSystemPlace::kNetwork, "fuse"},
    {0x01021994, FileSystemPlace::kMemory, "tmpfs"},
    {0x858458f6, FileSystemPlace::kMemory, "ramfs"},
    {0x958458f6, FileSystemPlace::kMemory, "hugetlbfs"},
    {0xef53, FileSystemPlace::kLocal, "ext4"},
    {0x58465342, FileSystemPlace::kLocal, "xfs"},
    {0x9123683e, FileSystemPlace::kLocal, "btrfs"},
    {0xf2f52010, FileSystemPlace::kLocal, "f2fs"},
    {0x2fc12fc1, FileSystemPlace::kLocal, "zfs"},
    {0x794c7630, FileSystemPlace::kLocal, "overlayfs"},
};

}  // namespace

FileSystemKind FileSystemKindOf(uint64_t type) {
  for (const Entry& entry : kEntries) {
    if (entry.type == type) return {entry.place, entry.name};
  }
  return {FileSystemPlace::kLocal, absl::StrFormat("type 0x%x", type)};
}

absl::StatusOr<FileSystemKind> FileSystemKindAt(const std::string& path) {
  struct statfs info = {};
  if (::statfs(path.c_str(), &info) != 0) return ErrnoError(errno, "statfs", path);
  // f_type is signed on some machines; the numbers have 32 bits.
  return FileSystemKindOf(static_cast<uint32_t>(info.f_type));
}

}  // namespace zeroshard
