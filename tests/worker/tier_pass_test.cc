#include "worker/nvme_tier.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "gtest/gtest.h"
#include "tests/worker/tier_fixture.h"

namespace zeroshard {
namespace {

constexpr uint32_t kDepth = 4;  // in each direction

// A drive that ends all that it was given at once, and shows one of them at the first look.
class WaveQueue final : public IoQueue {
 public:
  explicit WaveQueue(size_t depth) : depth_(depth) {}

  absl::Status Submit(const IoTransfer& transfer) override {
    given_.push_back(transfer);
    ++submitted_;
    return absl::OkStatus();
  }
  std::vector<IoCompletion> Wait(size_t min, const Deadline&) override {
    if (min > 0 && ended_.empty()) {
      for (const IoTransfer& transfer : std::exchange(given_, {})) ended_.push_back(Do(transfer));
    }
    const size_t seen = min > 0 ? std::min<size_t>(1, ended_.size()) : ended_.size();
    std::vector<IoCompletion> shown(ended_.begin(), ended_.begin() + static_cast<ptrdiff_t>(seen));
    ended_.erase(ended_.begin(), ended_.begin() + static_cast<ptrdiff_t>(seen));
    return shown;
  }
  std::vector<uint64_t> Close(const Deadline&) override { return {}; }
  size_t depth() const override { return depth_; }
  size_t in_flight() const override { return given_.size() + ended_.size(); }
  std::string description() const override { return "waves"; }

  size_t given() const { return given_.size(); }  // and not ended
  size_t submitted() const { return submitted_; }

 private:
  static IoCompletion Do(const IoTransfer& transfer) {
    const auto offset = static_cast<off_t>(transfer.offset);
    const ssize_t moved = transfer.operation == IoOperation::kRead
                              ? ::pread(transfer.fd, transfer.memory, transfer.bytes, offset)
                              : ::pwrite(transfer.fd, transfer.memory, transfer.bytes, offset);
    const bool all = moved == static_cast<ssize_t>(transfer.bytes);
    return {transfer.tag, all ? absl::OkStatus() : absl::UnknownError("not all bytes moved")};
  }

  const size_t depth_;
  std::vector<IoTransfer> given_;
  std::vector<IoCompletion> ended_;
  size_t submitted_ = 0;
};

// The parameter is the size of transfers: an image is one, or several.
class TierPassTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  TierPassTest() {
    job_.UsePool(0);  // work is done by the thread that looks after the queue
    job_.options().config.set_block_bytes(GetParam());
    job_.options().config.set_queue_depth(kDepth);
    job_.options().config.set_buffer_count(4);
    job_.options().cache_bytes = 0;
    job_.options().make_queue = [this](IoBackend, const IoQueueOptions& options) {
      auto queue = std::make_unique<WaveQueue>(options.depth);
      queue_ = queue.get();
      return absl::StatusOr<std::unique_ptr<IoQueue>>(std::move(queue));
    };
    EXPECT_EQ(job_.Open(), absl::OkStatus());
    EXPECT_EQ(job_.Fill(), absl::OkStatus());
  }

  TierJob job_{{.elements = {100 * 2048}, .parent = "/dev/shm"}};
  WaveQueue* queue_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(Blocks, TierPassTest,
                         ::testing::Values(uint64_t{1} << 20, uint64_t{8192}));

TEST_P(TierPassTest, TheQueueIsFullWheneverALaneWorks) {
  std::vector<TierItem> items;
  size_t transfers = 0;
  for (const uint32_t image : job_.Images()) {
    items.push_back({.read = image});
    transfers += (job_.plan().shape(image).image_bytes() + GetParam() - 1) / GetParam();
  }
  ASSERT_GT(items.size(), 100u);
  const size_t before = queue_->submitted();
  const auto work = [&](const TierItem&, const TierBuffers&) {
    const size_t left = transfers - (queue_->submitted() - before);
    EXPECT_EQ(queue_->in_flight(), queue_->given()) << "something has ended and was not looked at";
    EXPECT_TRUE(queue_->given() == 2 * kDepth || left == 0) << queue_->given() << ", left " << left;
    return absl::OkStatus();
  };
  ASSERT_EQ(job_.tier().Run(items, work), absl::OkStatus());
  ASSERT_EQ(job_.Check(), absl::OkStatus());
}

TEST_P(TierPassTest, ReadsFollowWritesBeforeALaneWorks) {
  const std::vector<TierItem> items = job_.StepItems();
  size_t calls = 0;
  const size_t before = queue_->submitted();
  const auto work = [&](const TierItem&, const TierBuffers&) {
    const bool reads_left = queue_->submitted() - before < items.size();
    // All staging memory holds what the first wave brought.
    EXPECT_TRUE(queue_->given() > 0 || !reads_left || calls == 0) << "the drive stands still";
    ++calls;
    return absl::OkStatus();
  };
  ASSERT_EQ(job_.tier().Begin(1, 1), absl::OkStatus());
  ASSERT_EQ(job_.tier().Run(items, work), absl::OkStatus());
  EXPECT_EQ(calls, items.size());
}

TEST_P(TierPassTest, NoMoreStagingMemoryIsTouchedThanTheCachesHold) {
  const uint64_t image_bytes = job_.plan().max_image_bytes();
  const auto touched = [&](uint64_t cache_bytes) {
    job_.options().cache_bytes = cache_bytes;
    EXPECT_EQ(job_.Open(/*recover=*/true), absl::OkStatus());
    std::set<const std::byte*> buffers;
    const auto work = [&](const TierItem&, const TierBuffers& bytes) {
      buffers.insert(bytes.read);
      return absl::OkStatus();
    };
    std::vector<TierItem> items;
    for (const uint32_t image : job_.Images()) items.push_back({.read = image});
    EXPECT_EQ(job_.tier().Run(items, work), absl::OkStatus());
    return buffers.size();
  };
  EXPECT_EQ(touched(0), 4 * kDepth) << "all that there is";
  EXPECT_EQ(touched(12 * image_bytes), 12u);
  // Whatever the caches are: what keeps the drive and the lane at work.
  const size_t blocks = (image_bytes + GetParam() - 1) / GetParam();
  EXPECT_EQ(touched(1), 2 * kDepth / blocks + 2);
}

// Room for so many items; each comes at the second look, and is there as late as it may be.
class SlowFeed final : public TierFeed {
 public:
  static constexpr size_t kRoom = 5;

  explicit SlowFeed(NvmeTier& tier) : tier_(tier) {}
  absl::StatusOr<bool> Begin(const TierItem& item) override {
    ZS_RETURN_IF_ERROR(Count());
    while (!going_.empty() && coming_.size() + going_.size() == kRoom) going_.erase(going_.begin());
    if (coming_.size() == kRoom) return false;
    coming_[item.read] = 0;
    return true;
  }
  absl::StatusOr<bool> HasCome(const TierItem& item) override {
    ZS_RETURN_IF_ERROR(Count());
    return ++coming_.at(item.read) > 1;
  }
  absl::Status Leave(const TierItem& item) override {
    ZS_RETURN_IF_ERROR(Count());
    coming_.erase(item.read);
    going_.insert(item.read);
    return absl::OkStatus();
  }
  absl::Status Arrive(const TierItem& item) override {
    ZS_RETURN_IF_ERROR(Count());
    EXPECT_TRUE(!item.rewrite || !tier_.Prepared(item.read) || !tier_.Prepared(item.write))
        << "complete before what it made is there";
    going_.erase(item.read);
    return absl::OkStatus();
  }

  // The items that are on their way while `item` is computed, it included.
  size_t Coming(const TierItem& item) const { return coming_.count(item.read) * coming_.size(); }
  size_t calls() const { return calls_; }
  void FailAt(size_t call) { fails_at_ = call; }

 private:
  absl::Status Count() {
    return ++calls_ == fails_at_ ? absl::AbortedError("the device is lost") : absl::OkStatus();
  }

  NvmeTier& tier_;
  std::map<uint32_t, int> coming_;  // by image, with the looks
  std::set<uint32_t> going_;
  size_t calls_ = 0;
  size_t fails_at_ = 0;
};

TEST_P(TierPassTest, WhatTheNextItemsNeedComesWhileOneIsComputed) {
  SlowFeed feed(job_.tier());
  const std::vector<TierItem> items = job_.StepItems();
  size_t left = items.size();
  const auto work = [&](const TierItem& item, const TierBuffers&) {
    const size_t coming = feed.Coming(item);
    EXPECT_GE(coming, std::min<size_t>(2, left)) << "nothing comes for the next one";
    EXPECT_LE(coming, SlowFeed::kRoom);
    --left;
    return absl::OkStatus();
  };
  ASSERT_EQ(job_.tier().Begin(1, 1), absl::OkStatus());
  ASSERT_EQ(job_.tier().Run(items, work, &feed), absl::OkStatus());
  EXPECT_EQ(left, 0u);
}

TEST(TierPassFeedTest, AnErrorAtAnyCallEndsThePassWhichMayBeRunAgain) {
  size_t failed = 0;
  for (bool clean = false; !clean; ++failed) {
    TierJob job({.elements = {6 * 2048}, .parent = "/dev/shm"});
    job.UsePool(0);
    ASSERT_EQ(job.Open(), absl::OkStatus());
    ASSERT_EQ(job.Fill(), absl::OkStatus());
    ASSERT_EQ(job.tier().Begin(1, 1), absl::OkStatus());
    SlowFeed feed(job.tier());
    feed.FailAt(failed + 1);
    const absl::Status status = job.RunStep(job.StepItems(), 1, &feed);
    clean = status.ok();
    ASSERT_TRUE(clean || absl::IsAborted(status)) << status;
    SlowFeed again(job.tier());
    ASSERT_EQ(job.RunStep(job.StepItems(), 1, &again), absl::OkStatus());
    EXPECT_EQ(again.calls() == 0, clean);
    ASSERT_EQ(job.tier().Commit(1), absl::OkStatus());
    job.Expect(1);
    ASSERT_EQ(job.Check(), absl::OkStatus());
  }
  EXPECT_GT(failed, 4u * 6);
}

}  // namespace
}  // namespace zeroshard
