#include "transport/nccl/rank_meeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/deadline.h"
#include "tests/fakes/nccl/fake_nccl.h"

namespace zeroshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The daemon's store of one generation.
class Store {
 public:
  absl::StatusOr<std::string> Rendezvous(const std::string& key,
                                         const std::optional<std::string>& value,
                                         absl::Duration timeout) {
    const Deadline deadline = Deadline::After(timeout);
    for (;;) {
      {
        std::lock_guard lock(mu_);
        if (value) {
          const auto [place, is_new] = values_.emplace(key, *value);
          if (!is_new && place->second != *value) return absl::AlreadyExistsError(key);
        }
        if (const auto found = values_.find(key); found != values_.end()) return found->second;
      }
      if (deadline.Passed()) return absl::DeadlineExceededError("key " + key + " was not set");
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  void Set(const std::string& key, const std::string& value) { values_[key] = value; }

 private:
  std::mutex mu_;
  std::map<std::string, std::string> values_;
};

std::vector<absl::StatusOr<Meeting>> Meet(Store& store, const std::vector<std::string>& nodes,
                                          uint32_t ranks,
                                          absl::Duration timeout = absl::Seconds(20)) {
  const NcclLibrary library = *NcclLibrary::Load();
  std::vector<absl::StatusOr<Meeting>> results(nodes.size());
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const RendezvousFunction rendezvous =
          [&store](const std::string& key, const std::optional<std::string>& value,
                   absl::Duration patience) { return store.Rendezvous(key, value, patience); };
      results[rank] = MeetRanks(library, rendezvous, {rank, ranks, 2, nodes[rank], timeout});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

class RankMeetingTest : public testing::Test {
 protected:
  void SetUp() override { FakeNcclReset(""); }
};

TEST_F(RankMeetingTest, AllRanksLearnTheSame) {
  Store store;
  const auto results = Meet(store, {"b", "a", "b", "c"}, 4);
  for (const absl::StatusOr<Meeting>& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->node_of_rank, ElementsAre(0, 1, 0, 2));
    ASSERT_EQ(result->ids.size(), 2u);
    EXPECT_NE(result->ids[0], result->ids[1]);
    EXPECT_EQ(result->ids, results[0]->ids);
  }
  Store another;
  EXPECT_NE(Meet(another, {"a"}, 1)[0]->ids, results[0]->ids);
}

TEST_F(RankMeetingTest, RanksWithAnotherVersionAreNamedOnAllRanks) {
  Store store;
  store.Set("nccl/rank/2", "21801\na");
  for (const absl::StatusOr<Meeting>& result : Meet(store, {"a", "a"}, 3)) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(result.status().ToString(), HasSubstr("rank 0 has NCCL 22809, rank 2 has 21801"));
  }
}

TEST_F(RankMeetingTest, ARankThatDoesNotComeIsNamed) {
  Store store;
  const auto results = Meet(store, {"a", "a"}, 3, absl::Milliseconds(200));
  EXPECT_EQ(results[0].status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(results[0].status().ToString(), HasSubstr("waiting for rank 2"));
  EXPECT_EQ(results[1].status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(RankMeetingTest, ValuesOfAnotherFormAreRefused) {
  const std::string id(256, 'a');
  for (const std::string& world :
       {std::string(), std::string("ids"), absl::StrCat("ids\n", id, "\n0,0"),
        absl::StrCat("ids\n", id, ",", id, "\n0"), absl::StrCat("ids\n", id, ",", id, "\n0,x"),
        absl::StrCat("ids\n", id, ",aa\n0,0")}) {
    Store store;
    store.Set("nccl/world", world);
    const NcclLibrary library = *NcclLibrary::Load();
    const RendezvousFunction rendezvous =
        [&store](const std::string& key, const std::optional<std::string>& value,
                 absl::Duration patience) { return store.Rendezvous(key, value, patience); };
    store.Set("nccl/rank/1", absl::StrCat(library.version(), "\na"));
    EXPECT_EQ(MeetRanks(library, rendezvous, {1, 2, 2, "a", absl::Seconds(1)}).status().code(),
              absl::StatusCode::kDataLoss)
        << world;
  }
}

}  // namespace
}  // namespace zeroshard
