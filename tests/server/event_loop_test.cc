#include "server/event_loop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace zeroshard {
namespace {

struct Loop {
  Loop() { loop = *EventLoop::Create(&clock); }
  SystemClock clock;
  std::unique_ptr<EventLoop> loop;
};

TEST(EventLoop, PostedFunctionsRunInOrder) {
  Loop l;
  std::string order;
  for (const char c : {'a', 'b', 'c'}) l.loop->Post([&order, c] { order += c; });
  l.loop->Post([&] { l.loop->Stop(); });
  l.loop->Run();
  EXPECT_EQ(order, "abc");
}

TEST(EventLoop, CallReturnsWhatTheLoopComputed) {
  Loop l;
  std::thread runner([&] { l.loop->Run(); });
  EXPECT_EQ(*l.loop->Call<int>([] { return 42; }), 42);
  l.loop->Stop();
  runner.join();
  EXPECT_FALSE(l.loop->Call<int>([] { return 1; }).ok());
  EXPECT_FALSE(l.loop->Post([] {}));
}

TEST(EventLoop, TimersFireInOrderOfTimeAndCancelledOnesDoNot) {
  Loop l;
  std::string order;
  const absl::Duration now = l.loop->Now();
  l.loop->At(now + absl::Milliseconds(20), [&] {
    order += 'b';
    l.loop->Stop();
  });
  l.loop->At(now + absl::Milliseconds(1), [&] { order += 'a'; });
  l.loop->Cancel(l.loop->At(now + absl::Milliseconds(2), [&] { order += 'x'; }));
  l.loop->Run();
  EXPECT_EQ(order, "ab");
}

TEST(EventLoop, ReadableDescriptorsAreReportedUntilUnwatched) {
  Loop l;
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  int calls = 0;
  ASSERT_TRUE(l.loop
                  ->Watch(pipes[0],
                          [&] {
                            if (++calls < 3) return;
                            l.loop->Unwatch(pipes[0]);
                            l.loop->Stop();
                          })
                  .ok());
  ASSERT_EQ(write(pipes[1], "x", 1), 1);
  l.loop->Run();
  EXPECT_EQ(calls, 3);
  close(pipes[0]);
  close(pipes[1]);
}

// The event was for the descriptor that had the number before.
TEST(EventLoop, AnEventOfTheSameBatchIsNotForTheNextDescriptorOfThatNumber) {
  Loop l;
  int pipes[3][2];
  for (auto& ends : pipes) ASSERT_EQ(pipe(ends), 0);
  int calls = 0;
  bool stale = false;
  // Both are readable at once; whichever is called first puts an empty pipe in the other's place.
  for (const int i : {0, 1}) {
    const auto replace = [&, other = pipes[1 - i][0]] {
      ++calls;
      l.loop->Unwatch(other);
      EXPECT_EQ(dup2(pipes[2][0], other), other);
      EXPECT_TRUE(l.loop->Watch(other, [&] { stale = true; }).ok());
      l.loop->Stop();
    };
    ASSERT_TRUE(l.loop->Watch(pipes[i][0], replace).ok());
    ASSERT_EQ(write(pipes[i][1], "x", 1), 1);
  }
  l.loop->Run();
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(stale);
  for (const auto& ends : pipes) {
    close(ends[0]);
    close(ends[1]);
  }
}

}  // namespace
}  // namespace zeroshard
