// A tree like /sys, /dev and /proc with drives of a test's choice.
#ifndef ZEROSHARD_TESTS_STORAGE_FAKE_DRIVES_H_
#define ZEROSHARD_TESTS_STORAGE_FAKE_DRIVES_H_

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "storage/drive_health.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {

class FakeDrives {
 public:
  FakeDrives() {
    for (const char* dir : {"sys/dev/block", "sys/block", "sys/class/block", "dev", "proc/self"}) {
      std::filesystem::create_directories(dir_.Path(dir));
    }
  }

  // Answers of SMART logs by device node ("nvme0"); others are refused. To be kept while used.
  std::map<std::string, std::vector<std::byte>> smart;

  DriveSources sources() const {
    return {.root = dir_.path(),
            .smart_log = [this](const std::string& node) -> absl::StatusOr<std::vector<std::byte>> {
              const std::string name = std::filesystem::path(node).filename();
              const auto it = smart.find(name);
              if (it != smart.end()) return it->second;
              return absl::PermissionDeniedError("open /dev/" + name + ": Permission denied");
            }};
  }

  // A device at `path` below sys/devices ("pci0/nvme/nvme0/nvme0n1") under a number ("259:0").
  // `parent` is what its link `device` leads to.
  void AddDrive(const std::string& path, const std::string& number, const std::string& parent,
                uint64_t bytes) {
    AddBlock(path, number);
    const std::string name = std::filesystem::path(path).filename();
    Link("sys/block/" + name, "sys/devices/" + path);
    if (!parent.empty()) Link("sys/devices/" + path + "/device", "sys/devices/" + parent);
    Put("sys/devices/" + path + "/size", std::to_string(bytes / 512));
    Put("sys/devices/" + path + "/queue/rotational", "0");
  }
  void AddPartition(const std::string& path, const std::string& number) {
    AddBlock(path, number);
    Put("sys/devices/" + path + "/partition", "1");
  }
  // `path` is a device that consists of others.
  void AddSlave(const std::string& path, const std::string& slave) {
    const std::string name = std::filesystem::path(slave).filename();
    Link("sys/devices/" + path + "/slaves/" + name, "sys/devices/" + slave);
  }
  void Put(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(dir_.Path(path)).parent_path());
    std::ofstream(dir_.Path(path)) << text << "\n";
  }
  void Link(const std::string& from, const std::string& to) {
    std::filesystem::create_directories(std::filesystem::path(dir_.Path(from)).parent_path());
    std::filesystem::create_directories(dir_.Path(to));
    std::filesystem::create_symlink(dir_.Path(to), dir_.Path(from));
  }
  const TempDir& dir() const { return dir_; }

 private:
  void AddBlock(const std::string& path, const std::string& number) {
    const std::string name = std::filesystem::path(path).filename();
    Link("sys/dev/block/" + number, "sys/devices/" + path);
    Link("sys/class/block/" + name, "sys/devices/" + path);
  }

  TempDir dir_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_FAKE_DRIVES_H_
