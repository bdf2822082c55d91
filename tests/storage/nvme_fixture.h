// Directories for tests of the NVMe tier: on a disk, in memory, and small file systems of the
// process's own.
#ifndef ZEROSHARD_TESTS_STORAGE_NVME_FIXTURE_H_
#define ZEROSHARD_TESTS_STORAGE_NVME_FIXTURE_H_

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/nvme_path.h"

namespace zeroshard {

// A directory on the disk of the test, removed with all that is in it.
class DiskDir {
 public:
  DiskDir() : DiskDir(std::filesystem::temp_directory_path().string()) {}
  explicit DiskDir(const std::string& parent) : path_(parent + "/zs-nvme-XXXXXX") {
    EXPECT_NE(::mkdtemp(path_.data()), nullptr) << path_;
  }
  DiskDir(const DiskDir&) = delete;
  DiskDir& operator=(const DiskDir&) = delete;
  ~DiskDir() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  std::string Own(const std::string& name) const { return path_ + "/zeroshard/" + name; }
  size_t OwnCount() const {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator(path_ + "/zeroshard")) {
      ++count;
    }
    return count;
  }

 private:
  std::string path_;
};

inline NvmePath Admit(const std::string& path) {
  auto admitted = AdmitNvmePath(path, {});
  EXPECT_TRUE(admitted.ok()) << admitted.status();
  return *std::move(admitted);
}

// Mounts a tmpfs in a mount namespace of this process's own; false where that is forbidden.
inline bool MountTmpfs(const std::string& path, const std::string& options, unsigned long flags) {
  static const bool kPrivate = [] {
    const int user = ::geteuid() == 0 ? 0 : CLONE_NEWUSER;
    const std::string uid = absl::StrCat(::geteuid(), " ", ::geteuid(), " 1");
    if (::unshare(CLONE_NEWNS | user) != 0) return false;
    if (user != 0) {
      std::ofstream("/proc/self/setgroups") << "deny";
      std::ofstream("/proc/self/uid_map") << uid;
    }
    return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  }();
  return kPrivate && ::mount("tmpfs", path.c_str(), "tmpfs", flags, options.c_str()) == 0;
}

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_NVME_FIXTURE_H_
