// The node's I/O budget: numbers of workers, and a day's count that outlives the daemon.
#include "server/node_io.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "base/clock.h"
#include "tests/storage/nvme_fixture.h"

namespace zeroshard {
namespace {

NodeIo::Options In(const DiskDir& dir) {
  NodeIo::Options options;
  options.state_dir = dir.path();
  options.save_interval = absl::Milliseconds(5);
  return options;
}

std::unique_ptr<NodeIo> Make(const SystemClock& clock, const DiskDir& dir) {
  auto io = NodeIo::Create(&clock, In(dir));
  EXPECT_TRUE(io.ok()) << io.status();
  return *std::move(io);
}

TEST(NodeIo, ANumberIsGivenBackWhenNobodyHoldsItAnyMore) {
  DiskDir dir;
  SystemClock clock;
  const auto io = Make(clock, dir);
  auto first = io->Add("gpt", 0);
  ASSERT_TRUE(first.ok());
  const uint32_t number = (*first)->number();
  const auto described = io->Describe(**first);
  EXPECT_EQ(described.index(), number);
  EXPECT_EQ(described.bytes(), IoBudget::Bytes());
  std::shared_ptr<const IoHolder> process = *first;
  first->reset();
  auto second = io->Add("gpt", 1);
  ASSERT_TRUE(second.ok());
  EXPECT_NE((*second)->number(), number);
  process.reset();
  auto third = io->Add("other", 0);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ((*third)->number(), number);
}

TEST(NodeIo, ADaysCountOutlivesTheDaemon) {
  DiskDir dir;
  SystemClock clock;
  {
    const auto io = Make(clock, dir);
    ASSERT_TRUE(io->AddPath("/mnt/nvme0").ok());
    const auto holder = io->Add("gpt", 0);
    ASSERT_TRUE(holder.ok());
    ASSERT_TRUE(io->budget().TryTake(0, (*holder)->number(), 4096, IoDirection::kWrite).granted);
    io->budget().Give(0, (*holder)->number());
  }
  const auto io = Make(clock, dir);
  ASSERT_TRUE(io->AddPath("/mnt/nvme0").ok());
  ASSERT_TRUE(io->AddPath("/mnt/nvme0").ok()) << "a second job";
  EXPECT_EQ(io->budget().today(0).written, 4096u);
}

TEST(NodeIo, CountsThatCannotBeReadBeginAnew) {
  DiskDir dir;
  SystemClock clock;
  std::ofstream(dir.path() + "/" + IoWriteCounts::kFileName) << "not counts";
  const auto io = Make(clock, dir);
  ASSERT_TRUE(io->AddPath("/mnt/nvme0").ok());
  EXPECT_EQ(io->budget().today(0).written, 0u);
}

TEST(NodeIo, ADirectoryBelowAPathSharesItsLimits) {
  DiskDir dir;
  SystemClock clock;
  const auto io = Make(clock, dir);
  const std::string path = dir.path() + "/drive";
  std::filesystem::create_directories(path + "/alice");
  std::filesystem::create_directory(path + "-2");
  std::filesystem::create_directory_symlink(path + "/alice", dir.path() + "/link");
  EXPECT_EQ(*io->AddPath(path), path);
  EXPECT_EQ(*io->AddPath(path + "/alice"), path);
  EXPECT_EQ(*io->AddPath(path + "/alice/../alice/"), path);
  EXPECT_EQ(*io->AddPath(dir.path() + "/link"), path);
  EXPECT_EQ(*io->AddPath(path + "-2"), path + "-2") << "beside it";
  EXPECT_EQ(*io->AddPath(dir.path()), dir.path()) << "above it";
  EXPECT_EQ(*io->AddPath("/dev/shm"), "/dev/shm");
  EXPECT_EQ(io->budget().devices(), 4u);
}

}  // namespace
}  // namespace zeroshard
