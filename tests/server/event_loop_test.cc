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

}  // namespace
}  // namespace zeroshard
