// Deaths of a worker at every store and every disk operation of a step, with what it left in flight
// landing in every mixture and at every later time: the job has always exactly the committed step.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/slot_table.h"
#include "tests/storage/slot_model.h"

namespace zeroshard {
namespace {

constexpr uint32_t kSpares = 4;
constexpr uint64_t kNever = 1000;

// How a successor ends the quarantine.
enum class Release {
  kDrained,    // as docs/nvme.md says
  kAtOnce,     // wrong: what is in flight may land later
  kWhenWhole,  // wrong: sectors that did not change read right before they land
};

struct Plan {
  std::vector<uint32_t> landed;  // units of each late write that land at the time of the kill
  uint64_t late = kNever;        // tick at which the others land
  bool drop = false;             // the attempt is dropped, the step is made again with other states
  uint32_t drain = 0;            // attempts after which the successor drains
  Release release = Release::kDrained;
};

// A life of the killed worker's successor, which makes three steps.
class Successor {
 public:
  Successor(const ModelWorld& killed, Plan plan) : world_(killed), plan_(std::move(plan)) {
    late_ = std::move(world_.disk.in_flight);
    world_.disk.in_flight.clear();
    plan_.landed.resize(late_.size());
    for (size_t i = 0; i < late_.size(); ++i) world_.disk.Land(late_[i], plan_.landed[i]);
  }

  // Returns what went wrong, or nothing. `attempt` is the one that was killed.
  std::string Run(uint64_t attempt, uint64_t salt) {
    auto table = SlotTable::Adopt(world_.region(), world_.shape());
    if (!table.ok()) return table.status().ToString();
    if (absl::Status status = table->Commit(world_.board_attempt); !status.ok()) {
      return status.ToString();
    }
    if (plan_.drop || world_.board_attempt == attempt) {
      ++attempt;
      salt += 10;
    }
    for (uint32_t made = 0; made < 3; ++made) {
      if (made == plan_.drain) EndQuarantine(*table);
      if (made == 2) Land();
      std::string bad = RunModelAttempt(world_, *table, attempt + made, salt, [&] { Tick(); });
      if (!bad.empty()) return bad;
    }
    return {};
  }

  // Worlds in which this successor was killed in its first attempt, with everything in flight.
  std::vector<ModelWorld> Kills(uint64_t attempt, uint64_t salt) {
    std::vector<ModelWorld> kills;
    auto table = SlotTable::Adopt(world_.region(), world_.shape());
    EXPECT_TRUE(table.ok()) << table.status();
    EXPECT_TRUE(table->Commit(world_.board_attempt).ok());
    const auto kill = [&] {
      kills.push_back(world_);
      auto& writes = kills.back().disk.in_flight;
      writes.insert(writes.begin(), late_.begin(), late_.end());
    };
    table->ObserveStores(kill);
    EXPECT_EQ(RunModelAttempt(world_, *table, attempt, salt, kill), "");
    kill();
    return kills;
  }

 private:
  void Tick() {
    if (ticks_++ == plan_.late) Land();
  }
  void Land() {
    for (size_t i = 0; i < late_.size(); ++i) {
      world_.disk.Land(late_[i], kAllModelUnits & ~plan_.landed[i]);
    }
    late_.clear();
  }
  void EndQuarantine(SlotTable& table) {
    if (plan_.release == Release::kDrained) Land();
    bool whole = true;
    for (const ModelWrite& write : late_) {
      const auto slot = world_.disk.slot(write.slot);
      whole = whole && std::equal(slot.begin(), slot.end(), write.image.begin());
    }
    if (whole || plan_.release == Release::kAtOnce) table.ReleaseDrained();
  }

  ModelWorld world_;
  Plan plan_;
  std::vector<ModelWrite> late_;
  uint64_t ticks_ = 0;
};

// Steps 0 and 1 are committed; returns every way to be killed in step 2.
std::vector<ModelWorld> KillsInStepTwo() {
  ModelWorld world(kSpares);
  EXPECT_EQ(FormatModel(world), "");
  auto table = SlotTable::Adopt(world.region(), world.shape());
  EXPECT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(RunModelAttempt(world, *table, 1, 1, [] {}), "");
  return Successor(world, {}).Kills(2, 2);
}

// All mixtures of landed units of `writes` writes.
std::vector<std::vector<uint32_t>> Mixtures(size_t writes) {
  std::vector<std::vector<uint32_t>> mixtures = {{}};
  for (size_t i = 0; i < writes; ++i) {
    std::vector<std::vector<uint32_t>> longer;
    for (const auto& mixture : mixtures) {
      for (uint32_t units = 0; units <= kAllModelUnits; ++units) {
        longer.push_back(mixture);
        longer.back().push_back(units);
      }
    }
    mixtures = std::move(longer);
  }
  return mixtures;
}

// Tries everything that can follow the kills; returns the first violation.
std::string Explore(const std::vector<ModelWorld>& kills, Release release, uint64_t* runs) {
  constexpr uint64_t max_ticks = 20;
  for (size_t k = 0; k < kills.size(); ++k) {
    for (const auto& landed : Mixtures(kills[k].disk.in_flight.size())) {
      for (uint32_t drain = 0; drain < 3; ++drain) {
        const bool drained_first = drain == 0 && release == Release::kDrained;
        for (uint64_t late = drained_first ? max_ticks : 0; late <= max_ticks; ++late) {
          for (bool drop : {false, true}) {
            ++*runs;
            std::string bad = Successor(kills[k], {landed, late, drop, drain, release}).Run(2, 2);
            if (!bad.empty()) return "kill " + std::to_string(k) + ": " + bad;
          }
        }
      }
    }
  }
  return {};
}

TEST(SlotCrashTest, AnyKillInAStepAndAnyLateWriteLeavesTheCommittedStep) {
  const std::vector<ModelWorld> kills = KillsInStepTwo();
  ASSERT_GE(kills.size(), 15u);
  size_t most = 0;
  for (const ModelWorld& kill : kills) most = std::max(most, kill.disk.in_flight.size());
  ASSERT_EQ(most, 2u) << "both chunks are in flight at once";
  uint64_t runs = 0;
  EXPECT_EQ(Explore(kills, Release::kDrained, &runs), "");
  EXPECT_GT(runs, 10000u);
}

// The model is able to find what it looks for.
TEST(SlotCrashTest, WithoutADrainALateWriteIsFoundInTheStates) {
  uint64_t runs = 0;
  EXPECT_NE(Explore(KillsInStepTwo(), Release::kAtOnce, &runs), "");
}

TEST(SlotCrashTest, AnImageThatReadsBackWholeMayStillBeInFlight) {
  uint64_t runs = 0;
  EXPECT_NE(Explore(KillsInStepTwo(), Release::kWhenWhole, &runs), "");
}

TEST(SlotCrashTest, TheSuccessorMayBeKilledToo) {
  uint64_t runs = 0;
  for (const ModelWorld& first : KillsInStepTwo()) {
    if (first.board_attempt == 2) continue;
    for (bool drop : {false, true}) {
      const uint64_t attempt = drop ? 3 : 2;
      for (const ModelWorld& second : Successor(first, {}).Kills(attempt, attempt)) {
        const size_t writes = second.disk.in_flight.size();
        for (uint32_t units : {0u, 1u, 6u}) {
          for (uint64_t late = 0; late < 20; late += 3) {
            for (uint32_t drain : {1u, 2u}) {
              ++runs;
              const Plan plan{std::vector<uint32_t>(writes, units), late, drop, drain,
                              Release::kDrained};
              ASSERT_EQ(Successor(second, plan).Run(attempt, attempt), "");
            }
          }
        }
      }
    }
  }
  EXPECT_GT(runs, 10000u);
}

}  // namespace
}  // namespace zeroshard
