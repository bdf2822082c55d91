#include "device/cuda/topology.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

// A sysfs in a folder of the test's own: PCI devices at their paths, with the links that lead to
// them.
class SysfsTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
    root_ = fs::path(testing::TempDir()) / ("sysfs-" + test + "-" + std::to_string(getpid()));
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void Write(const fs::path& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }

  // `path` below devices/; its last part is the PCI address.
  void AddDevice(const std::string& path, int node, const std::string& cpus) {
    const fs::path directory = fs::path("devices") / path;
    Write(directory / "numa_node", std::to_string(node));
    Write(directory / "local_cpulist", cpus);
    const fs::path link = root_ / "bus/pci/devices" / directory.filename();
    fs::create_directories(link.parent_path());
    fs::create_directory_symlink(root_ / directory, link);
  }

  void AddClass(const std::string& kind, const std::string& name, const std::string& path) {
    const fs::path directory = root_ / "class" / kind / name;
    fs::create_directories(directory);
    if (!path.empty()) fs::create_directory_symlink(root_ / "devices" / path, directory / "device");
  }

  void AddRdma(const std::string& name, const std::string& path, const std::string& state) {
    AddClass("infiniband", name, path);
    Write(fs::path("class/infiniband") / name / "ports/1/state", state);
  }

  void AddInterface(const std::string& name, const std::string& path, const std::string& state) {
    AddClass("net", name, path);
    Write(fs::path("class/net") / name / "operstate", state);
  }

  GpuPlace Read(const std::string& pci) {
    const absl::StatusOr<GpuPlace> place = ReadGpuPlace(pci, root_.string());
    EXPECT_TRUE(place.ok()) << place.status();
    return place.value_or(GpuPlace());
  }

  fs::path root_;
};

std::vector<std::string> Summary(const GpuPlace& place) {
  std::vector<std::string> lines;
  for (const Nic& nic : place.nics) {
    lines.push_back(nic.name + " " + std::string(PciDistanceName(nic.distance)) +
                    (nic.active ? "" : " down"));
  }
  return lines;
}

// The shape of a board with eight GPUs: each shares a switch with a card, four a socket.
TEST_F(SysfsTest, TheCardOnTheGpusSwitchIsNearest) {
  AddDevice("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:19:00.0", 0, "0-3,8-11");
  AddDevice("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:18:00.0", 0, "0-3,8-11");
  AddDevice("pci0000:15/0000:15:03.0/0000:1a:00.0", 0, "0-3,8-11");
  AddDevice("pci0000:37/0000:37:01.0/0000:38:00.0", 0, "0-3,8-11");
  AddDevice("pci0000:a0/0000:a0:01.0/0000:a1:00.0", 1, "4-7,12-15");
  AddRdma("mlx5_3", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:18:00.0", "4: ACTIVE");
  AddRdma("mlx5_2", "pci0000:15/0000:15:03.0/0000:1a:00.0", "4: ACTIVE");
  AddRdma("mlx5_1", "pci0000:37/0000:37:01.0/0000:38:00.0", "4: ACTIVE");
  AddRdma("mlx5_0", "pci0000:a0/0000:a0:01.0/0000:a1:00.0", "4: ACTIVE");
  AddInterface("ib3", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:18:00.0", "down");

  const GpuPlace place = Read("00000000:19:00.0");
  EXPECT_EQ(place.pci_bus_id, "0000:19:00.0");
  EXPECT_EQ(place.numa_node, 0);
  EXPECT_EQ(place.cpus, (std::vector<int>{0, 1, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(Summary(place), (std::vector<std::string>{"mlx5_3 switch", "mlx5_2 bridge",
                                                      "mlx5_1 node", "mlx5_0 system"}));
  EXPECT_EQ(place.nics[0].interface, "ib3");
  EXPECT_EQ(place.nics[0].pci_bus_id, "0000:18:00.0");
  EXPECT_TRUE(place.nics[0].rdma);
  EXPECT_EQ(place.nics[3].numa_node, 1);
}

TEST_F(SysfsTest, OfEqualDistanceCardsThatAreUpAndHaveRdmaComeFirst) {
  AddDevice("pci0000:00/0000:00:01.0/0000:01:00.0", -1, "0-1");
  AddDevice("pci0000:00/0000:00:02.0/0000:02:00.0", -1, "0-1");
  AddDevice("pci0000:00/0000:00:03.0/0000:03:00.0", -1, "0-1");
  AddDevice("pci0000:00/0000:00:04.0/0000:04:00.0", -1, "0-1");
  AddRdma("mlx5_0", "pci0000:00/0000:00:02.0/0000:02:00.0", "1: DOWN");
  AddRdma("mlx5_1", "pci0000:00/0000:00:03.0/0000:03:00.0", "4: ACTIVE");
  AddInterface("eth0", "pci0000:00/0000:00:04.0/0000:04:00.0", "up");
  const GpuPlace place = Read("01:00.0");
  EXPECT_EQ(place.numa_node, -1);
  EXPECT_EQ(Summary(place),
            (std::vector<std::string>{"mlx5_1 bridge", "eth0 bridge", "mlx5_0 bridge down"}));
  EXPECT_FALSE(place.nics[1].rdma);
}

TEST_F(SysfsTest, InterfacesThatAreNoPciDevicesAreLeftOut) {
  AddDevice("pci0000:00/0000:00:01.0/0000:01:00.0", 0, "0");
  AddInterface("lo", "", "unknown");
  AddInterface("usb0", "pci0000:00/0000:00:01.0/usb1", "up");
  fs::create_directories(root_ / "devices/pci0000:00/0000:00:01.0/usb1");
  EXPECT_TRUE(Read("0000:01:00.0").nics.empty());
}

TEST_F(SysfsTest, AMachineThatHidesTheDeviceSaysSo) {
  const absl::StatusOr<GpuPlace> hidden = ReadGpuPlace("0000:01:00.0", root_.string());
  EXPECT_EQ(hidden.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadGpuPlace("gpu0", root_.string()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SysfsTest, AFileWithoutSenseIsAnErrorOrUnknown) {
  AddDevice("pci0000:00/0000:01:00.0", 0, "0-");
  EXPECT_EQ(ReadGpuPlace("0000:01:00.0", root_.string()).status().code(),
            absl::StatusCode::kInvalidArgument);
  AddDevice("pci0000:00/0000:02:00.0", 0, "");
  Write("devices/pci0000:00/0000:02:00.0/numa_node", "none");
  const GpuPlace place = Read("0000:02:00.0");
  EXPECT_EQ(place.numa_node, -1);
  EXPECT_TRUE(place.cpus.empty());
}

TEST(PciBusIdTest, AllSpellingsOfAnAddressAreOne) {
  for (const char* text : {"0000:3B:00.0", "00000000:3b:00.0", "3b:00.0", "0000:3b:00.0"}) {
    EXPECT_EQ(NormalPciBusId(text).value_or("error"), "0000:3b:00.0") << text;
  }
  EXPECT_EQ(NormalPciBusId("10000:01:1f.7").value_or("error"), "10000:01:1f.7");
  for (const char* text :
       {"", "3b", "3b:00", "0000:3b:00.8", "0000:3b:20.0", "0000:100:00.0", "x:0.0",
        "0000:3b:00.0.0", "0000::00.0", "-1:00.0", "0000000000:01:00.0"}) {
    EXPECT_FALSE(NormalPciBusId(text).ok()) << text;
  }
}

TEST(CpuListTest, ListsAreReadAndWritten) {
  for (const char* text : {"", "0", "0-3", "0-3,8", "0,2,4-5", "65535"}) {
    const auto cpus = ParseCpuList(text);
    ASSERT_TRUE(cpus.ok()) << cpus.status();
    EXPECT_EQ(CpuListText(*cpus), text);
  }
  EXPECT_EQ(ParseCpuList("3,1-2,2\n").value_or(std::vector<int>()), (std::vector<int>{1, 2, 3}));
  for (const char* text : {"-1", "3-1", "1-2-3", "a", "1,,2", "65536", "0-99999999999"}) {
    EXPECT_FALSE(ParseCpuList(text).ok()) << text;
  }
}

}  // namespace
}  // namespace zeroshard
