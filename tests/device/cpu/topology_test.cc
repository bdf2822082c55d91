#include "device/cpu/topology.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "device/cpu/affinity.h"
#include "device/cpu/cache.h"

namespace zeroshard {
namespace {

TEST(TopologyTest, EveryAllowedProcessorLiesInOneNode) {
  const auto nodes = ReadTopology();
  ASSERT_TRUE(nodes.ok()) << nodes.status();
  ASSERT_FALSE(nodes->empty());
  std::multiset<int> found;
  for (const NumaCores& node : *nodes) {
    EXPECT_FALSE(node.cpus.empty());
    found.insert(node.cpus.begin(), node.cpus.end());
  }
  const std::vector<int> allowed = AllowedCpus();
  EXPECT_EQ(found, std::multiset<int>(allowed.begin(), allowed.end()));
}

TEST(TopologyTest, ProcessorsThatAreNotAllowedAreLeftOut) {
  const std::vector<int> allowed = AllowedCpus();
  ASSERT_TRUE(BindThisThread({allowed.back()}).ok());
  const auto nodes = ReadTopology();
  ASSERT_TRUE(BindThisThread(allowed).ok());
  ASSERT_TRUE(nodes.ok()) << nodes.status();
  ASSERT_EQ(nodes->size(), 1u);
  EXPECT_EQ(nodes->front().cpus, std::vector<int>{allowed.back()});
  EXPECT_FALSE(BindThisThread({}).ok());
}

TEST(TopologyTest, DevicesAreSpreadOverTheNodes) {
  EXPECT_EQ(NumaNodeOfDevice("cpu:0", 2), 0u);
  EXPECT_EQ(NumaNodeOfDevice("cpu:1", 2), 1u);
  EXPECT_EQ(NumaNodeOfDevice("cpu:2", 2), 0u);
  EXPECT_EQ(NumaNodeOfDevice("cpu:17", 4), 1u);
  EXPECT_EQ(NumaNodeOfDevice("cpu:5", 1), 0u);
}

TEST(CacheTest, TheLargestOfThoseThatAreDescribedCounts) {
  const std::filesystem::path directory = std::filesystem::path(testing::TempDir()) / "caches";
  EXPECT_EQ(LastLevelCacheBytes(directory), 0u);
  const char* sizes[] = {"48K\n", "32K\n", "2M\n", "1024K\n"};
  for (int index = 0; index < 4; ++index) {
    const std::filesystem::path cache = directory / ("index" + std::to_string(index));
    std::filesystem::create_directories(cache);
    std::ofstream(cache / "size") << sizes[index];
  }
  EXPECT_EQ(LastLevelCacheBytes(directory), uint64_t{2} << 20);
}

}  // namespace
}  // namespace zeroshard
