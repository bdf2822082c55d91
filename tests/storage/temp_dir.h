// A directory for one test, removed with all that is in it. In memory where that is possible:
// sweeps over every byte of a file sync thousands of times.
#ifndef ZEROSHARD_TESTS_STORAGE_TEMP_DIR_H_
#define ZEROSHARD_TESTS_STORAGE_TEMP_DIR_H_

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "storage/named_dir.h"

namespace zeroshard {

class TempDir {
 public:
  TempDir() {
    const std::filesystem::path memory = "/dev/shm";
    const bool in_memory = ::access(memory.c_str(), W_OK) == 0;
    const auto parent = in_memory ? memory : std::filesystem::temp_directory_path();
    std::string path = (parent / "zs-test-XXXXXX").string();
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    path_ = path;
    absl::StatusOr<UniqueFd> fd = OpenDirectory(path_);
    EXPECT_TRUE(fd.ok()) << fd.status();
    fd_ = *std::move(fd);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() { std::filesystem::remove_all(path_); }

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  std::string Path(const std::string& name) const { return path_ + "/" + name; }

  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name), std::ios::binary);
    EXPECT_TRUE(file.good()) << Path(name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream file(Path(name), std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(file.flush().good()) << Path(name);
  }
  // Number of entries, hidden ones included.
  size_t Count() const {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(path_)) ++count;
    return count;
  }

 private:
  std::string path_;
  UniqueFd fd_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_TEMP_DIR_H_
