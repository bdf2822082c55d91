// The GPUs of a node: what a probe says, which jobs fit on them, and whose GPU is whose.
#include "server/node_gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/devices.h"
#include "server/gpu_probe.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kGiB = uint64_t{1} << 30;

constexpr const char* kUsable = "\"usable\": true, \"problem\": \"\"";

std::string Line(int ordinal, const std::string& more = kUsable) {
  return absl::StrCat("{\"device\": \"cuda:", ordinal,
                      "\", \"name\": \"NVIDIA H100\", \"uuid\": ", "\"GPU-0000000", ordinal,
                      "-0000-0000-0000-000000000000\", ",
                      "\"memory_bytes\": 85899345920, \"numa_node\": -1, ", more, "}\n");
}

std::vector<Gpu> Found(const std::string& output) {
  auto gpus = ParseGpuProbe(output);
  EXPECT_TRUE(gpus.ok()) << gpus.status();
  return gpus.ok() ? *std::move(gpus) : std::vector<Gpu>();
}

std::unique_ptr<NodeGpus> Gpus(int count, uint64_t limit = 0) {
  std::string output;
  for (int i = 0; i < count; ++i) output += Line(i);
  auto gpus = NodeGpus::Create({kAllGpus}, limit, Found(output));
  EXPECT_TRUE(gpus.ok()) << gpus.status();
  return *std::move(gpus);
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(GpuProbe, ALineADevice) {
  std::string second = Line(1);
  second.replace(second.find("-1"), 2, "1");
  const std::vector<Gpu> gpus = Found(Line(0) + second);
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[1].device, "cuda:1");
  EXPECT_EQ(gpus[1].ordinal, 1u);
  EXPECT_EQ(gpus[1].uuid.size(), 16u);
  EXPECT_EQ(GpuUuidText(gpus[1].uuid), "GPU-00000001-0000-0000-0000-000000000000");
  EXPECT_EQ(gpus[0].numa_node, std::nullopt);
  EXPECT_EQ(gpus[1].numa_node, 1u);
  EXPECT_EQ(gpus[0].total_bytes, 80 * kGiB);
}

TEST(GpuProbe, NoDeviceAtAll) {
  const auto gpus = ParseGpuProbe("zeroshard-worker: no CUDA device: libcuda.so.1 is not there\n");
  EXPECT_TRUE(absl::IsUnavailable(gpus.status())) << gpus.status();
  EXPECT_EQ(Message(gpus.status()), "no CUDA device: libcuda.so.1 is not there");
}

TEST(GpuProbe, WhatIsNoProbesOutputIsShown) {
  for (const std::string text :
       {"Segmentation fault\n", "[1]\n", "", "{\"device\": \"cpu:x\"}\n",
        "{\"device\": \"cuda:0\", \"uuid\": \"GPU-12\", \"usable\": true}\n", "{\"device\": 3}\n",
        "{\"device\": \"cuda:0\", \"uuid\": \"00000000000000000000000000000000\"}\n"}) {
    EXPECT_TRUE(absl::IsInternal(ParseGpuProbe(text).status())) << text;
  }
}

TEST(GpuProbe, AProgramThatDiesOrIsNotThereIsNamed) {
  EXPECT_THAT(Message(ProbeGpus("/bin/false", absl::Seconds(30)).status()),
              HasSubstr("/bin/false --probe exited with code 1"));
  EXPECT_FALSE(ProbeGpus("/nowhere/zeroshard-worker", absl::Seconds(30)).ok());
}

TEST(NodeGpus, TheDevicesOfTheConfigurationAreLookedFor) {
  const auto gpus = NodeGpus::Create({"cuda:1"}, 0, Found(Line(0) + Line(1)));
  ASSERT_TRUE(gpus.ok()) << gpus.status();
  EXPECT_THAT((*gpus)->devices(), ElementsAre("cuda:1"));
  EXPECT_THAT(Message(NodeGpus::Create({"cuda:2"}, 0, Found(Line(0) + Line(1))).status()),
              AllOf(HasSubstr("there is no cuda:2"), HasSubstr("cuda:0, cuda:1"),
                    HasSubstr("CUDA_VISIBLE_DEVICES")));
}

TEST(NodeGpus, OneThatCannotBeUsedIsLeftOutOfAllAndRefusedByName) {
  const std::string mig = Line(1, "\"usable\": false, \"problem\": \"cuda:1 is a MIG slice\"");
  const auto all = NodeGpus::Create({kAllGpus}, 0, Found(Line(0) + mig));
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_THAT((*all)->devices(), ElementsAre("cuda:0"));
  EXPECT_THAT(Message(NodeGpus::Create({"cuda:1"}, 0, Found(Line(0) + mig)).status()),
              HasSubstr("MIG slice"));
  EXPECT_THAT(Message(NodeGpus::Create({kAllGpus}, 0, Found(mig)).status()),
              HasSubstr("no GPU can be used: cuda:1 is a MIG slice"));
}

model::v1::Device OnGpu(const NodeGpus& gpus, size_t index) {
  model::v1::Device device;
  device.set_uuid(gpus.gpus()[index].uuid);
  device.set_name("NVIDIA H100");
  return device;
}

TEST(PlaceOnGpus, RanksThatDoNotSayTakeTheFirstThatAreLeft) {
  const auto gpus = Gpus(4);
  const auto places =
      PlaceOnGpus(gpus->gpus(), std::vector<model::v1::Device>{{}, OnGpu(*gpus, 0), {}});
  ASSERT_TRUE(places.ok()) << places.status();
  EXPECT_THAT(*places, ElementsAre("cuda:1", "cuda:0", "cuda:2"));
}

TEST(PlaceOnGpus, AGpuOfTwoRanksOrOfNoDaemonIsRefusedWithBothNamed) {
  const auto gpus = Gpus(2);
  EXPECT_THAT(Message(PlaceOnGpus(gpus->gpus(),
                                  std::vector<model::v1::Device>{OnGpu(*gpus, 1), OnGpu(*gpus, 1)})
                          .status()),
              AllOf(HasSubstr("ranks 0 and 1 both train on cuda:1"), HasSubstr("LOCAL_RANK")));
  model::v1::Device other = OnGpu(*gpus, 0);
  other.set_uuid(std::string(16, 'x'));
  EXPECT_THAT(Message(PlaceOnGpus(gpus->gpus(), std::vector<model::v1::Device>{other}).status()),
              AllOf(HasSubstr("rank 0 trains on GPU-78787878-"), HasSubstr("cuda:0, GPU-00000000-"),
                    HasSubstr("cuda:1, GPU-00000001-")));
}

TEST(CheckSameGpu, NamesBoth) {
  const auto gpus = Gpus(2);
  EXPECT_TRUE(CheckSameGpu(1, OnGpu(*gpus, 1), gpus->gpus()[1]).ok());
  EXPECT_TRUE(CheckSameGpu(1, {}, gpus->gpus()[1]).ok());
  EXPECT_THAT(Message(CheckSameGpu(1, OnGpu(*gpus, 0), gpus->gpus()[1])),
              AllOf(HasSubstr("rank 1 trains on GPU-00000000-"),
                    HasSubstr("worker's memory is on cuda:1, GPU-00000001-")));
}

JobPlan PlanOf(uint64_t bytes) {
  JobPlan plan;
  plan.workers.emplace_back().set_device("cuda:0");
  plan.gpus.push_back({.shared = bytes / 4, .states = bytes / 2, .trainer = bytes / 4});
  model::v1::LedgerLine& line = plan.ledger.emplace_back();
  line.set_holder("worker 0");
  line.set_tier("gpu");
  line.set_state("master");
  line.set_bytes(bytes);
  return plan;
}

TEST(CheckGpuMemory, AJobMustFitBesideOthersWithinTheLimit) {
  const auto gpus = Gpus(1, 3 * kGiB);
  EXPECT_TRUE(CheckGpuMemory("a", PlanOf(2 * kGiB), *gpus, {}).ok());
  EXPECT_TRUE(CheckGpuMemory("a", PlanOf(2 * kGiB), *gpus, {{"cuda:1", 2 * kGiB}}).ok());
  const absl::Status full = CheckGpuMemory("a", PlanOf(2 * kGiB), *gpus, {{"cuda:0", 2 * kGiB}});
  EXPECT_TRUE(absl::IsResourceExhausted(full));
  EXPECT_THAT(Message(full), AllOf(HasSubstr("needs 2.00 GiB of cuda:0, 1.00 GiB free of 3.00 GiB"),
                                   HasSubstr("(gpu_memory_limit)"), HasSubstr("master 2.00 GiB"),
                                   HasSubstr("offload_optimizer.device")));
}

TEST(NodeGpus, WhatIsFreeIsForgottenWithTheJobThatSaidSo) {
  const auto gpus = Gpus(1);
  EXPECT_EQ(gpus->Free("cuda:0"), std::nullopt);
  gpus->SetFree("cuda:0", 5);
  EXPECT_EQ(gpus->Free("cuda:0"), 5u);
  gpus->SetFree("cuda:0", std::nullopt);
  EXPECT_EQ(gpus->Free("cuda:0"), std::nullopt);
}

}  // namespace
}  // namespace zeroshard
