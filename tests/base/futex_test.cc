#include "base/futex.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/shared_memory.h"

namespace zeroshard {
namespace {

using Word = std::atomic<uint32_t>;

TEST(FutexTest, ADifferentValueReturnsAtOnce) {
  const Word word = 1;
  EXPECT_EQ(FutexWait(word, 0, absl::InfiniteDuration()), FutexResult::kWoken);
}

TEST(FutexTest, TimesOut) {
  const Word word = 1;
  EXPECT_EQ(FutexWait(word, 1, absl::Milliseconds(5)), FutexResult::kTimedOut);
  EXPECT_EQ(FutexWait(word, 1, -absl::Seconds(5)), FutexResult::kTimedOut);
  EXPECT_FALSE(FutexAwaitChange(word, 1, absl::Milliseconds(5), absl::Milliseconds(1)));
}

TEST(FutexTest, WakesAWaitingThread) {
  for (int round = 0; round < 200; ++round) {
    Word word = 0;
    std::thread waker([&word] {
      word.store(1, std::memory_order_release);
      FutexWakeAll(word);
    });
    EXPECT_TRUE(FutexAwaitChange(word, 0, absl::Seconds(20)));
    waker.join();
  }
}

TEST(FutexTest, WakesAWaiterOfAReadOnlyMappingInAnotherProcess) {
  const UniqueFd fd = CreateSealedMemfd("word", 4096).value();
  const MappedRegion writer = MappedRegion::Map(fd.get(), 4096, Access::kReadWrite).value();
  const MappedRegion reader = MappedRegion::Map(fd.get(), 4096, Access::kReadOnly).value();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool changed = FutexAwaitChange(*reader.As<Word>(), 0, absl::Seconds(20));
    ::_exit(changed && reader.As<Word>()->load() == 5 ? 0 : 1);
  }
  writer.As<Word>()->store(5);
  FutexWakeAll(*writer.As<Word>());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace zeroshard
