#include "transport/mesh_rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/conformance/mesh_conformance.h"

namespace zeroshard {
namespace {

class Worker {
 public:
  Worker(RendezvousStore& store, uint32_t index, absl::Duration timeout = absl::Seconds(20))
      : options_{.worker = index, .workers = 2, .timeout = timeout} {
    rendezvous_.emplace(store, options_, stopping_, [this](const absl::Status& status) {
      waits.push_back(std::string(status.message()));
    });
  }
  MeshRendezvous* operator->() { return &*rendezvous_; }
  void Stop() { stopping_.store(true); }
  std::vector<std::string> waits;

 private:
  const RendezvousOptions options_;
  std::atomic<bool> stopping_{false};
  std::optional<MeshRendezvous> rendezvous_;
};

TEST(MeshRendezvous, ASuccessorTakesTheEpochAfterThoseOfItsPredecessors) {
  MapStore store;
  EXPECT_EQ(Worker(store, 1)->FirstUnusedEpoch(), 1u);
  ASSERT_TRUE(store.Set("mesh/1/joined_1", "none").ok());
  ASSERT_TRUE(store.Set("mesh/2/joined_1", "none").ok());
  EXPECT_EQ(Worker(store, 1)->FirstUnusedEpoch(), 3u);
  EXPECT_EQ(Worker(store, 0)->FirstUnusedEpoch(), 1u);
}

TEST(MeshRendezvous, WhoWaitsForADeadWorkerGoesOnWithItsSuccessor) {
  MapStore store;
  Worker waiting(store, 0);
  ASSERT_TRUE(store.Set("mesh/1/joined_1", "none").ok());  // and died before it set its address
  ASSERT_TRUE(waiting->Join(1).ok());
  absl::StatusOr<std::string> address = absl::UnknownError("");
  std::thread thread([&] { address = waiting->Await(1, "mesh/1/1"); });
  Worker successor(store, 1);
  const uint64_t epoch = successor->FirstUnusedEpoch();
  EXPECT_EQ(epoch, 2u);
  std::thread meets([&] { EXPECT_TRUE(successor->Join(epoch).ok()); });
  thread.join();
  EXPECT_TRUE(absl::IsAborted(address.status())) << address.status();
  EXPECT_TRUE(waiting->Join(2).ok());
  meets.join();
}

TEST(MeshRendezvous, AnEpochThatIsOverIsNotWaitedIn) {
  MapStore store;
  ASSERT_TRUE(store.Set("mesh/1/over", "1").ok());
  EXPECT_TRUE(absl::IsAborted(Worker(store, 0)->Join(1)));
}

TEST(MeshRendezvous, NamesWhoDidNotCome) {
  MapStore store;
  Worker worker(store, 0, absl::Milliseconds(250));
  const absl::Status status = worker->Join(1);
  EXPECT_TRUE(absl::IsAborted(status));
  EXPECT_EQ(std::string(status.message()), "worker 1 did not come within 250ms");
  EXPECT_EQ(worker.waits, std::vector<std::string>{"waiting for worker 1"});
}

TEST(MeshRendezvous, AWaitEndsWhenTheMeshEnds) {
  MapStore store;
  Worker worker(store, 0);
  worker.Stop();
  EXPECT_TRUE(absl::IsCancelled(worker->Join(1)));
}

// A store that does not answer at first, or never says anything but that the job is gone.
class SulkyStore final : public RendezvousStore {
 public:
  SulkyStore(int failures, const absl::Status& failure) : left_(failures), failure_(failure) {}
  absl::Status Set(const std::string& key, const std::string& value) override {
    return left_-- > 0 ? failure_ : store_.Set(key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    return left_-- > 0 ? absl::StatusOr<std::string>(failure_) : store_.Get(key, timeout);
  }

 private:
  MapStore store_;
  int left_;
  const absl::Status failure_;
};

TEST(MeshRendezvous, AStoreThatDoesNotAnswerIsNoUnusedEpoch) {
  SulkyStore store(2, absl::UnavailableError("node 0 does not answer"));
  ASSERT_TRUE(store.Set("x", "").code() == absl::StatusCode::kUnavailable);
  Worker worker(store, 0);
  EXPECT_EQ(worker->FirstUnusedEpoch(), 1u);
  EXPECT_EQ(worker.waits, std::vector<std::string>{"node 0 does not answer"});
}

TEST(MeshRendezvous, AStoreWithoutTheJobIsTheEnd) {
  SulkyStore store(100, absl::FailedPreconditionError("the job has ended on node 0"));
  Worker worker(store, 0);
  EXPECT_EQ(worker->FirstUnusedEpoch(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(worker->Join(1)));
}

}  // namespace
}  // namespace zeroshard
