// Holders of an I/O budget in simulated time, and the shared memory of one.
#ifndef ZEROSHARD_TESTS_STORAGE_IO_BUDGET_FIXTURE_H_
#define ZEROSHARD_TESTS_STORAGE_IO_BUDGET_FIXTURE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/shared_memory.h"
#include "gtest/gtest.h"
#include "storage/io_budget.h"

namespace zeroshard {

// A budget in memory that forked children share.
class SharedIoBudget {
 public:
  explicit SharedIoBudget(const Clock* clock) : clock_(clock) {
    const UniqueFd fd = *CreateSealedMemfd("zeroshard-test", IoBudget::Bytes());
    region_ = *MappedRegion::Map(fd.get(), IoBudget::Bytes(), Access::kReadWrite);
    EXPECT_TRUE(IoBudget::Format(region_.bytes(), clock).ok());
  }
  IoBudget budget() const { return *IoBudget::Adopt(region_.bytes(), clock_); }
  std::span<std::byte> memory() const { return region_.bytes(); }

 private:
  const Clock* clock_;
  MappedRegion region_;
};

// What a simulated holder does, from `begin` to `end`: always one more transfer.
struct SimulatedLoad {
  uint32_t holder = 0;
  uint64_t bytes = 1 << 20;
  IoDirection direction = IoDirection::kRead;
  uint32_t lanes = 64;  // transfers that it has in flight at most
  std::function<absl::Duration()> service = [] { return absl::Microseconds(100); };
  absl::Duration begin = absl::ZeroDuration();
  absl::Duration end = absl::InfiniteDuration();
  std::function<absl::Duration()> late = [] { return absl::ZeroDuration(); };  // after a wait
};

class IoSimulation {
 public:
  IoSimulation(ManualClock* clock, IoBudget budget, uint32_t device)
      : clock_(clock), budget_(std::move(budget)), device_(device) {}

  void Add(const SimulatedLoad& load) {
    loads_.push_back({load, 0, false, 0});
    At(clock_->Elapsed() + load.begin, loads_.size() - 1, Event::kAsk);
  }

  // Moves the clock to `until` after the clock's start.
  void RunUntil(absl::Duration until) {
    while (!events_.empty() && events_.begin()->first <= until) {
      const auto [at, what] = *events_.begin();
      events_.erase(events_.begin());
      clock_->Advance(at - clock_->Elapsed());
      what.kind == Event::kAsk ? Ask(what.load) : Done(what.load);
    }
    clock_->Advance(until - clock_->Elapsed());
  }

  uint64_t moved(size_t load) const { return loads_[load].moved; }
  uint64_t total() const {
    uint64_t sum = 0;
    for (const Load& load : loads_) sum += load.moved;
    return sum;
  }
  uint32_t in_flight(size_t load) const { return loads_[load].in_flight; }
  uint32_t most_in_flight() const { return most_in_flight_; }
  // Times and bytes of all grants.
  const std::vector<std::pair<absl::Duration, uint64_t>>& grants() const { return grants_; }

 private:
  struct Event {
    enum Kind { kAsk, kDone } kind;
    size_t load;
  };
  struct Load {
    SimulatedLoad load;
    uint32_t in_flight;
    bool full;  // waits for a lane of its own
    uint64_t moved;
  };

  void At(absl::Duration at, size_t load, Event::Kind kind) {
    events_.insert({at, Event{kind, load}});
  }

  void Ask(size_t index) {
    Load& self = loads_[index];
    const absl::Duration now = clock_->Elapsed();
    if (now >= self.load.end) return;
    self.full = self.in_flight == self.load.lanes;
    if (self.full) return;
    const IoTurn turn =
        budget_.TryTake(device_, self.load.holder, self.load.bytes, self.load.direction);
    if (!turn.granted) {
      ASSERT_GT(turn.wait, absl::ZeroDuration());
      At(now + turn.wait + self.load.late(), index, Event::kAsk);
      return;
    }
    self.moved += self.load.bytes;
    grants_.push_back({now, self.load.bytes});
    ++self.in_flight;
    most_in_flight_ = std::max(most_in_flight_, ++all_in_flight_);
    At(now + self.load.service(), index, Event::kDone);
    At(now, index, Event::kAsk);
  }

  void Done(size_t index) {
    Load& self = loads_[index];
    budget_.Give(device_, self.load.holder);
    --self.in_flight;
    --all_in_flight_;
    if (self.full) At(clock_->Elapsed(), index, Event::kAsk);
    self.full = false;
  }

  ManualClock* clock_;
  const IoBudget budget_;
  const uint32_t device_;
  std::vector<Load> loads_;
  std::multimap<absl::Duration, Event> events_;
  std::vector<std::pair<absl::Duration, uint64_t>> grants_;
  uint32_t all_in_flight_ = 0;
  uint32_t most_in_flight_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_IO_BUDGET_FIXTURE_H_
