// Directories for tests of the NVMe tier on a disk, where O_DIRECT may work.
#ifndef ZEROSHARD_TESTS_STORAGE_NVME_FIXTURE_H_
#define ZEROSHARD_TESTS_STORAGE_NVME_FIXTURE_H_

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

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

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_NVME_FIXTURE_H_
