#include "server/kv_store.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroshard {
namespace {

struct Waits {
  std::vector<absl::StatusOr<std::string>> answers;
  KvStore::Done Done() {
    return [this](const absl::StatusOr<std::string>& value) { answers.push_back(value); };
  }
};

TEST(KvStore, AValueThatIsThereIsAnsweredAtOnce) {
  KvStore store;
  Waits waits;
  ASSERT_TRUE(store.Set("a", "1").ok());
  store.Get("a", 0, absl::Seconds(1), waits.Done());
  ASSERT_EQ(waits.answers.size(), 1u);
  EXPECT_EQ(*waits.answers[0], "1");
}

TEST(KvStore, WaitersHearWhenTheKeyIsSet) {
  KvStore store;
  Waits waits;
  store.Get("a", 0, absl::Seconds(1), waits.Done());
  store.Get("a", 1, absl::Seconds(1), waits.Done());
  store.Get("b", 1, absl::Seconds(9), waits.Done());
  ASSERT_TRUE(store.Set("a", "1").ok());
  EXPECT_EQ(waits.answers.size(), 2u);
  EXPECT_EQ(store.Expire(absl::ZeroDuration()), absl::Seconds(9));
}

TEST(KvStore, AKeyThatNobodySetsIsNamedAtTheDeadline) {
  KvStore store;
  Waits waits;
  store.Get("gen3/rank1", 0, absl::Seconds(5), waits.Done());
  EXPECT_EQ(store.Expire(absl::Seconds(4)), absl::Seconds(5));
  EXPECT_TRUE(waits.answers.empty());
  EXPECT_EQ(store.Expire(absl::Seconds(5)), absl::InfiniteDuration());
  ASSERT_EQ(waits.answers.size(), 1u);
  EXPECT_EQ(waits.answers[0].status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(waits.answers[0].status().message().find("gen3/rank1"), std::string::npos);
}

TEST(KvStore, AValueIsNeverReplacedByAnother) {
  KvStore store;
  ASSERT_TRUE(store.Set("a", "1").ok());
  EXPECT_TRUE(store.Set("a", "1").ok());
  EXPECT_EQ(store.Set("a", "2").code(), absl::StatusCode::kAlreadyExists);
}

TEST(KvStore, ADeadWorkerIsNotAnswered) {
  KvStore store;
  Waits waits;
  store.Get("a", 3, absl::Seconds(1), waits.Done());
  store.DropWaiters(3);
  ASSERT_TRUE(store.Set("a", "1").ok());
  EXPECT_TRUE(waits.answers.empty());
}

TEST(KvStore, AllWaitersHearOfTheEnd) {
  KvStore store;
  Waits waits;
  store.Get("a", 3, absl::Seconds(1), waits.Done());
  store.Get("b", 4, absl::Seconds(9), waits.Done());
  store.FailWaiters(absl::NotFoundError("ended"));
  ASSERT_EQ(waits.answers.size(), 2u);
  EXPECT_EQ(waits.answers[1].status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store.Expire(absl::Seconds(10)), absl::InfiniteDuration());
}

TEST(KvStore, IsBounded) {
  KvStore store;
  const std::string big(40 << 20, 'x');
  ASSERT_TRUE(store.Set("a", big).ok());
  EXPECT_EQ(store.Set("b", big).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace zeroshard
