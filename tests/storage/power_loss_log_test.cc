#include "tests/fakes/power_loss_log.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "storage/io_thread_queue.h"
#include "tests/conformance/io_queue_fixture.h"
#include "tests/fakes/faulty_io_queue.h"

namespace zeroshard {
namespace {

class PowerLossLogTest : public ::testing::Test {
 protected:
  PowerLossLogTest() : file_(::memfd_create("disk", MFD_CLOEXEC)) {
    EXPECT_EQ(::ftruncate(file_.get(), 4 * kSectorBytes), 0);
    log_.Watch(file_.get());
  }

  // A write of `count` sectors, all of them the letter.
  uint64_t Begin(char letter, uint64_t sector, size_t count = 1) {
    const std::vector<std::byte> data(count * kSectorBytes, static_cast<std::byte>(letter));
    return log_.BeginWrite(file_.get(), sector * kSectorBytes, data);
  }

  // The first letters of all sectors, '.' for those never written, in each state, after its mark.
  std::set<std::string> States(size_t tears = 0) {
    std::set<std::string> states;
    const auto options = PowerLossLog::Options{.whole_subsets = 64, .tears = tears};
    visited_ = log_.ForEachState(options, [&](const PowerLossLog::State& state) {
      const std::vector<std::byte>& file = state.files.at(PowerLossLog::IdOf(file_.get()));
      std::string text = std::to_string(state.mark) + " ";
      for (size_t i = 0; i < file.size(); i += kSectorBytes) {
        text += file[i] == std::byte{0} ? '.' : static_cast<char>(file[i]);
      }
      states.insert(text);
    });
    return states;
  }

  UniqueFd file_;
  PowerLossLog log_;
  size_t visited_ = 0;
};

using Set = std::set<std::string>;

TEST_F(PowerLossLogTest, WritesWithoutASyncMayAllBeMissing) {
  log_.End(Begin('a', 0));
  Begin('b', 2);
  EXPECT_EQ(States(), (Set{"0 ....", "0 a...", "0 ..b.", "0 a.b."}));
  EXPECT_EQ(visited_, 4u);
}

TEST_F(PowerLossLogTest, ASyncKeepsWhatHadEndedBeforeItBegan) {
  log_.End(Begin('a', 0));
  const uint64_t late = Begin('b', 1);
  const uint64_t sync = log_.BeginSync(file_.get());
  log_.End(late);
  log_.End(sync);
  log_.Mark(1);
  log_.End(Begin('c', 2));
  const Set states = States();
  // Before the sync ends nothing is sure; after it 'a' is, and 'b', which ended too late, is not.
  EXPECT_TRUE(states.contains("0 ...."));
  EXPECT_TRUE(states.contains("0 .b.."));
  EXPECT_EQ((Set{states.lower_bound("1"), states.end()}),
            (Set{"1 a...", "1 ab..", "1 a.c.", "1 abc."}));
}

TEST_F(PowerLossLogTest, ASyncOfAnotherFileKeepsNothing) {
  const UniqueFd other(::memfd_create("other", MFD_CLOEXEC));
  log_.Watch(other.get());
  log_.End(Begin('a', 0));
  log_.End(log_.BeginSync(other.get()));
  log_.Mark(1);
  EXPECT_TRUE(States().contains("1 ...."));
}

TEST_F(PowerLossLogTest, ALaterWriteOfAPlaceWins) {
  log_.End(Begin('a', 0));
  log_.End(Begin('b', 0));
  EXPECT_EQ(States(), (Set{"0 ....", "0 a...", "0 b..."}));
}

TEST_F(PowerLossLogTest, WritesAreTornBetweenSectors) {
  Begin('a', 0, 4);
  const Set states = States(/*tears=*/300);
  EXPECT_TRUE(states.contains("0 a..."));
  EXPECT_TRUE(states.contains("0 aaa."));
  EXPECT_TRUE(states.contains("0 ...a"));
  EXPECT_EQ(states.size(), 16u) << "also any others";
}

TEST_F(PowerLossLogTest, ManyWritesAreSampledNotEnumerated) {
  for (int i = 0; i < 40; ++i) log_.End(Begin('a', i % 4));
  EXPECT_TRUE(States().contains("0 ...."));
  EXPECT_EQ(visited_, 2u + 80 + 64);
}

// A journal of two slots that is written as such things must be, and one that is not.
class TwoSlots {
 public:
  TwoSlots(IoQueue& queue, PowerLossLog& log, int fd) : queue_(queue), log_(log), fd_(fd) {}

  void Commit(uint64_t step, bool sync_the_data) {
    const uint64_t slot = step % 2;
    Put(kSectorBytes * (2 + slot), step);
    if (sync_the_data) {
      EXPECT_TRUE(Do(queue_, Sync(fd_)).ok());
    }
    Put(kSectorBytes * slot, step);
    EXPECT_TRUE(Do(queue_, Sync(fd_)).ok());
    log_.Mark(step);
  }

  // The step that a file recovers to; nothing when its data is not that of the step.
  static std::optional<uint64_t> Recover(const std::vector<std::byte>& file) {
    const uint64_t step = std::max(At(file, 0), At(file, kSectorBytes));
    if (At(file, kSectorBytes * (2 + step % 2)) != step) return std::nullopt;
    return step;
  }

 private:
  void Put(uint64_t offset, uint64_t value) {
    std::memcpy(memory_.data(), &value, sizeof(value));
    EXPECT_TRUE(Do(queue_, Write(fd_, memory_.bytes().first(kSectorBytes), offset)).ok());
  }
  static uint64_t At(const std::vector<std::byte>& file, size_t offset) {
    uint64_t value = 0;
    std::memcpy(&value, file.data() + offset, sizeof(value));
    return value;
  }

  IoQueue& queue_;
  PowerLossLog& log_;
  const int fd_;
  AlignedBuffer memory_ = Buffer(4096);
};

TEST_F(PowerLossLogTest, TellsACrashSafeJournalFromOneThatIsNot) {
  for (const bool safe : {true, false}) {
    const UniqueFd file(::memfd_create("journal", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(file.get(), 4 * kSectorBytes), 0);
    PowerLossLog log;
    log.Watch(file.get());
    FaultyIoQueue queue(Made(MakeIoThreadQueue({.depth = 4})), {}, 1, &log);
    TwoSlots journal(queue, log, file.get());
    for (uint64_t step = 1; step <= 5; ++step) journal.Commit(step, safe);
    size_t broken = 0;
    const size_t states = log.ForEachState({}, [&](const PowerLossLog::State& state) {
      const auto step = TwoSlots::Recover(state.files.at(PowerLossLog::IdOf(file.get())));
      if (!step.has_value() || *step < state.mark || *step > state.mark + 1) ++broken;
    });
    EXPECT_GT(states, 20u);
    EXPECT_EQ(broken == 0, safe) << broken << " of " << states;
  }
}

// A device that swallows a flush breaks even the good one: faults show in the log.
TEST_F(PowerLossLogTest, SeesALostSync) {
  const UniqueFd file(::memfd_create("journal", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), 4 * kSectorBytes), 0);
  PowerLossLog log;
  log.Watch(file.get());
  const std::vector<IoFault> faults = {{.at = 5, .kind = IoFaultKind::kLost}};
  FaultyIoQueue queue(Made(MakeIoThreadQueue({.depth = 4})), faults, 1, &log);
  TwoSlots journal(queue, log, file.get());
  journal.Commit(1, true);
  journal.Commit(2, true);
  EXPECT_EQ(queue.injected(), 1u);
  size_t broken = 0;
  log.ForEachState({}, [&](const PowerLossLog::State& state) {
    const auto step = TwoSlots::Recover(state.files.at(PowerLossLog::IdOf(file.get())));
    if (!step.has_value() || *step < state.mark) ++broken;
  });
  EXPECT_GT(broken, 0u);
}

}  // namespace
}  // namespace zeroshard
