// Drives behind partitions, device mapper and RAID, and their health, in a made-up /sys.
#include "storage/drive_health.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/storage/fake_drives.h"

namespace zeroshard {
namespace {

using Names = std::vector<std::string>;

std::vector<std::byte> SmartPage() {
  std::vector<std::byte> page(kSmartLogBytes);
  page[1] = std::byte{0x2c};  // 300 K
  page[2] = std::byte{0x01};
  page[5] = std::byte{12};
  page[48] = std::byte{2};
  page[160] = std::byte{5};
  return page;
}

class DriveHealthTest : public ::testing::Test {
 protected:
  DriveHealthTest() {
    drives_.AddDrive("pci0/nvme/nvme0/nvme0n1", "259:0", "pci0/nvme/nvme0", 1'000'000'000'512);
    drives_.AddPartition("pci0/nvme/nvme0/nvme0n1/nvme0n1p2", "259:2");
    drives_.Put("sys/devices/pci0/nvme/nvme0/model", "ACME 1000   ");
    drives_.AddDrive("pci1/ata1/sda", "8:0", "pci1/ata1", 4096);
    drives_.AddPartition("pci1/ata1/sda/sda1", "8:1");
  }
  Names DrivesOf(unsigned major, unsigned minor) {
    const auto drives = DrivesOfDevice(makedev(major, minor), drives_.sources());
    EXPECT_TRUE(drives.ok()) << drives.status();
    return drives.ok() ? *drives : Names{};
  }

  FakeDrives drives_;
};

TEST_F(DriveHealthTest, APartitionLiesOnItsDrive) {
  EXPECT_EQ(DrivesOf(259, 0), Names{"nvme0n1"});
  EXPECT_EQ(DrivesOf(259, 2), Names{"nvme0n1"});
  EXPECT_EQ(DrivesOf(8, 1), Names{"sda"});
}

TEST_F(DriveHealthTest, MappersAndRaidsAreFollowedToTheEnd) {
  drives_.AddDrive("virtual/md0", "9:0", "", 0);
  drives_.AddSlave("virtual/md0", "pci0/nvme/nvme0/nvme0n1/nvme0n1p2");
  drives_.AddSlave("virtual/md0", "pci1/ata1/sda");
  drives_.AddDrive("virtual/dm-1", "253:1", "", 0);
  drives_.AddSlave("virtual/dm-1", "virtual/md0");
  EXPECT_EQ(DrivesOf(253, 1), (Names{"nvme0n1", "sda"}));
}

TEST_F(DriveHealthTest, DevicesThatLieOnThemselvesEnd) {
  drives_.AddDrive("virtual/dm-1", "253:1", "", 0);
  drives_.AddSlave("virtual/dm-1", "virtual/dm-1");
  EXPECT_FALSE(DrivesOfDevice(makedev(253, 1), drives_.sources()).ok());
}

TEST_F(DriveHealthTest, ADeviceThatIsNotThereIsSaidToBeNotFound) {
  const auto drives = DrivesOfDevice(makedev(7, 9), drives_.sources());
  EXPECT_EQ(drives.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(drives.status().message().find("7:9"), absl::string_view::npos);
  EXPECT_EQ(DrivesBehind("/no/such/path", drives_.sources()).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(DriveHealthTest, AFileSystemWithANumberOfItsOwnIsFoundByItsMount) {
  struct stat file = {};
  ASSERT_EQ(::stat(drives_.dir().path().c_str(), &file), 0);
  if (major(file.st_dev) != 0) GTEST_SKIP() << "the test's directory lies on a block device";
  const std::string path = drives_.dir().path();
  EXPECT_EQ(DrivesBehind(path, drives_.sources()).status().code(), absl::StatusCode::kNotFound);
  drives_.Put("dev/nvme0n1p2", "");
  drives_.Put("proc/self/mountinfo",
              absl::StrCat("22 27 0:999 / /proc rw,relatime - proc proc rw\n60 27 ",
                           major(file.st_dev), ":", minor(file.st_dev),
                           " /vol /mnt/a rw shared:5 - btrfs /dev/nvme0n1p2 rw,subvol=/vol"));
  const auto drives = DrivesBehind(path, drives_.sources());
  ASSERT_TRUE(drives.ok()) << drives.status();
  EXPECT_EQ(*drives, Names{"nvme0n1"});
}

TEST_F(DriveHealthTest, AnNvmeDriveTellsItsSmartLog) {
  drives_.smart["nvme0"] = SmartPage();
  const DriveHealth health = ReadDriveHealth("nvme0n1", drives_.sources());
  EXPECT_EQ(health.model, "ACME 1000");
  EXPECT_EQ(health.bytes, 1'000'000'000'512u);
  EXPECT_FALSE(health.rotational);
  EXPECT_EQ(health.temperature_celsius, 27);
  EXPECT_EQ(health.used_percent, 12);
  EXPECT_EQ(health.media_errors, 5u);
  EXPECT_EQ(health.written_bytes, 1'024'000u);
  EXPECT_TRUE(health.missing.empty());
  EXPECT_EQ(DescribeDrive(health),
            "nvme0n1 (ACME 1000, 1000.0 GB), 27 C, 12 % used, 5 media errors, 0.0 TB written");
}

TEST_F(DriveHealthTest, WithoutPrivilegeThereIsTheSensor) {
  for (const char* place : {"nvme0/hwmon3", "hwmon/hwmon1"}) {
    FakeDrives drives;
    drives.AddDrive("pci0/nvme/nvme0/nvme0n1", "259:0", "pci0/nvme/nvme0", 512);
    drives.Link("sys/devices/pci0/nvme/nvme0/device", "sys/devices/pci0");
    const bool newer = std::string(place).starts_with("nvme0");
    drives.Put(std::string("sys/devices/pci0/") + (newer ? "nvme/" : "") + place + "/temp1_input",
               "41850");
    const DriveHealth health = ReadDriveHealth("nvme0n1", drives.sources());
    EXPECT_EQ(health.temperature_celsius, 41.85) << place;
    EXPECT_EQ(health.used_percent, std::nullopt);
    EXPECT_EQ(health.missing,
              Names{"no wear and media errors: open /dev/nvme0: Permission denied"});
  }
}

TEST_F(DriveHealthTest, ADriveOfSeveralControllersIsAskedByTheFirstThatAnswers) {
  drives_.AddDrive("virtual/nvme-subsystem/nvme-subsys1/nvme1n1", "259:5",
                   "virtual/nvme-subsystem/nvme-subsys1", 512);
  for (const char* controller : {"nvme1", "nvme2"}) {
    drives_.Link(std::string("sys/devices/virtual/nvme-subsystem/nvme-subsys1/") + controller,
                 std::string("sys/devices/pci2/nvme/") + controller);
  }
  drives_.smart["nvme2"] = SmartPage();
  EXPECT_EQ(ReadDriveHealth("nvme1n1", drives_.sources()).media_errors, 5u);
  drives_.smart.clear();
  const DriveHealth health = ReadDriveHealth("nvme1n1", drives_.sources());
  ASSERT_FALSE(health.missing.empty());
  EXPECT_EQ(health.missing[0], "no wear and media errors: open /dev/nvme1: Permission denied");
}

TEST_F(DriveHealthTest, ADamagedSmartLogIsAReasonNotAValue) {
  drives_.smart["nvme0"] = std::vector<std::byte>(kSmartLogBytes);
  const DriveHealth health = ReadDriveHealth("nvme0n1", drives_.sources());
  EXPECT_EQ(health.used_percent, std::nullopt);
  EXPECT_EQ(health.missing[0], "no wear and media errors: the SMART log is all zeros");
}

TEST_F(DriveHealthTest, OtherDrivesTellWhatSysHas) {
  drives_.Put("sys/devices/pci1/ata1/hwmon/hwmon2/temp1_input", "33000");
  drives_.Put("sys/devices/pci1/ata1/sda/queue/rotational", "1");
  const DriveHealth sata = ReadDriveHealth("sda", drives_.sources());
  EXPECT_EQ(sata.temperature_celsius, 33);
  EXPECT_TRUE(sata.rotational);
  EXPECT_EQ(sata.missing, Names{"no wear and media errors: not an NVMe drive"});
  EXPECT_EQ(DescribeDrive(sata), "sda (0.0 GB, rotating), 33 C");

  drives_.AddDrive("soc/mmcblk0", "179:0", "soc/mmc0", 512);
  drives_.Put("sys/devices/soc/mmc0/life_time", "0x02 0x03");
  const DriveHealth emmc = ReadDriveHealth("mmcblk0", drives_.sources());
  EXPECT_EQ(emmc.used_percent, 30);
  EXPECT_EQ(emmc.missing.size(), 2u);
}

TEST_F(DriveHealthTest, ADriveThatIsGoneIsAllAbsent) {
  for (const char* name : {"nvme7n1", "sdz"}) {
    const DriveHealth health = ReadDriveHealth(name, drives_.sources());
    EXPECT_EQ(health.bytes, 0u);
    EXPECT_EQ(health.temperature_celsius, std::nullopt);
    EXPECT_EQ(health.missing.size(), 2u);
  }
}

TEST_F(DriveHealthTest, TheMachinesOwnDrivesCanBeAsked) {
  const auto drives = DrivesBehind("/", SystemDriveSources());
  if (!drives.ok()) GTEST_SKIP() << drives.status();
  for (const std::string& name : *drives) {
    const DriveHealth health = ReadDriveHealth(name, SystemDriveSources());
    EXPECT_GT(health.bytes, 0u) << name;
    EXPECT_NE(DescribeDrive(health).find(name), std::string::npos);
  }
  const auto none = SystemDriveSources().smart_log("/dev/null");
  EXPECT_FALSE(none.ok());
  EXPECT_NE(none.status().message().find("/dev/null"), absl::string_view::npos) << none.status();
}

TEST(DriveWarningTest, TheBitsOfTheCriticalWarningAreNamed) {
  EXPECT_EQ(DescribeCriticalWarning(0), "");
  EXPECT_EQ(DescribeCriticalWarning(0x09), "spare is low, read-only");
  EXPECT_EQ(DescribeCriticalWarning(0x80), "bit 7");
}

}  // namespace
}  // namespace zeroshard
