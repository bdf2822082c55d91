// What programs say about the GPUs of a machine: with a fake driver, and with none.
#include "device/cuda/available.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr char kWorker[] = "worker/zeroshard-worker";
constexpr char kFakeFolder[] = "tests/fakes/cuda";

struct Answer {
  int code = -1;
  std::string text;  // stdout, then stderr
  std::vector<nlohmann::json> devices;
};

// The worker's program with these arguments, where libcuda.so.1 is the one in `folder`.
Answer Probe(const std::string& arguments, const std::string& folder,
             const std::string& settings = "") {
  const std::string command = "LD_LIBRARY_PATH=" + folder + " ZEROSHARD_FAKE_CUDA='" + settings +
                              "' " + kWorker + " " + arguments + " 2>&1";
  Answer answer;
  FILE* const pipe = popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  std::array<char, 4096> buffer;
  while (fgets(buffer.data(), buffer.size(), pipe) != nullptr) {
    const std::string line = buffer.data();
    answer.text += line;
    if (line.front() == '{') answer.devices.push_back(nlohmann::json::parse(line));
  }
  const int status = pclose(pipe);
  answer.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return answer;
}

bool MachineHasADriver() {
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library != nullptr) dlclose(library);
  return library != nullptr;
}

TEST(ProbeTest, WithoutADriverAllSayWhatToInstall) {
  if (MachineHasADriver()) GTEST_SKIP() << "this machine has a driver";
  const Answer answer = Probe("--probe", "");
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.text,
              AllOf(HasSubstr("zeroshard-worker: no CUDA device: libcuda.so.1 cannot be opened ("),
                    HasSubstr("No such file or directory"), HasSubstr("install the NVIDIA driver"),
                    HasSubstr("--device cpu:0")));
  const absl::Status usable = CheckCudaUsable();
  EXPECT_EQ(usable.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer.text, "zeroshard-worker: " + std::string(usable.message()) + "\n");
  EXPECT_EQ(DescribeCudaDevices().status(), usable);
  EXPECT_EQ(CheckCudaDevice("cuda:0"), usable);
  EXPECT_EQ(CheckCudaDevice("cpu:0").code(), absl::StatusCode::kInvalidArgument);
}

TEST(ProbeTest, DevicesAreDescribedOneALine) {
  const Answer answer = Probe("--probe", kFakeFolder, "devices=2,memory=1G,cc=9.0,name=A \"GPU\"");
  EXPECT_EQ(answer.code, 0) << answer.text;
  ASSERT_EQ(answer.devices.size(), 2u) << answer.text;
  for (int i = 0; i < 2; ++i) {
    const nlohmann::json& device = answer.devices[i];
    EXPECT_EQ(device["device"], "cuda:" + std::to_string(i));
    EXPECT_EQ(device["name"], "A \"GPU\"");
    EXPECT_EQ(device["compute_capability"], "9.0");
    EXPECT_EQ(device["memory_bytes"], 1 << 30);
    EXPECT_EQ(device["usable"], true);
    EXPECT_EQ(device["problem"], "");
    EXPECT_EQ(device["uuid"].get<std::string>().substr(0, 4), "GPU-");
    EXPECT_TRUE(device["nics"].is_array());
  }
}

TEST(ProbeTest, ADeviceThatCannotBeUsedIsListedWithItsProblem) {
  const Answer answer = Probe("--probe", kFakeFolder, "cc=7.0");
  EXPECT_EQ(answer.code, 1);
  ASSERT_EQ(answer.devices.size(), 1u) << answer.text;
  EXPECT_EQ(answer.devices[0]["usable"], false);
  EXPECT_THAT(answer.devices[0]["problem"].get<std::string>(), HasSubstr("too old"));
  EXPECT_THAT(answer.text, HasSubstr("zeroshard-worker: no CUDA device: cuda:0"));
}

TEST(ProbeTest, ADriverOlderThanTheToolkitIsNamedWithBothVersions) {
  const Answer answer = Probe("--probe", kFakeFolder, "driver=12080");
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.text, AllOf(HasSubstr("no CUDA device: the driver"),
                                 HasSubstr("supports CUDA 12.8, but this build needs CUDA 13.0"),
                                 HasSubstr("install a newer NVIDIA driver")));
  EXPECT_EQ(Probe("--probe", kFakeFolder, "driver=13020").code, 0);
}

TEST(ProbeTest, MachinesWithoutAGpuAndBrokenDriversAreNotSilent) {
  EXPECT_THAT(Probe("--probe", kFakeFolder, "devices=0").text, HasSubstr("no CUDA device"));
  const Answer mismatch =
      Probe("--probe", kFakeFolder, "fault=cuInit:1:CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
  EXPECT_EQ(mismatch.code, 1);
  EXPECT_THAT(mismatch.text, AllOf(HasSubstr("no CUDA device: cuInit"), HasSubstr("reboot")));
  const Answer stub = Probe("--probe", kFakeFolder, "fault=cuInit:1:CUDA_ERROR_STUB_LIBRARY");
  EXPECT_THAT(stub.text, HasSubstr("stub"));
}

TEST(ProbeTest, DevicesByNameAreAllNeeded) {
  EXPECT_EQ(Probe("--probe cuda:0 cuda:1", kFakeFolder, "devices=2").code, 0);
  const Answer beyond = Probe("--probe cuda:0 cuda:2", kFakeFolder, "devices=2");
  EXPECT_EQ(beyond.code, 1);
  EXPECT_THAT(beyond.text, HasSubstr("no device cuda:2"));
  const Answer wrong = Probe("--probe gpu0", kFakeFolder, "devices=2");
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.text, HasSubstr("\"gpu0\" is no CUDA device; expected one as cuda:0"));
  EXPECT_THAT(wrong.devices, IsEmpty());
  EXPECT_THAT(Probe("--help", "").text, HasSubstr("--probe"));
}

}  // namespace
}  // namespace zeroshard
