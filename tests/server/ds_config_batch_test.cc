#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "server/ds_config.h"

namespace zeroshard {
namespace {

constexpr std::optional<std::int64_t> kNone;

struct Accepted {
  BatchConfig given;
  std::int64_t ranks;
  Batch batch;
};

TEST(ResolveBatch, DerivesWhatIsMissing) {
  const Accepted cases[] = {
      {{32, kNone, kNone}, 4, {32, 8, 1}}, {{32, 4, kNone}, 4, {32, 4, 2}},
      {{kNone, 4, 2}, 4, {32, 4, 2}},      {{kNone, 4, kNone}, 3, {12, 4, 1}},
      {{32, kNone, 2}, 4, {32, 4, 2}},     {{32, 4, 2}, 4, {32, 4, 2}},
      {{1, 1, 1}, 1, {1, 1, 1}},           {{252, 2, 18}, 7, {252, 2, 18}},
  };
  for (const Accepted& c : cases) {
    const absl::StatusOr<Batch> batch = ResolveBatch(c.given, c.ranks);
    ASSERT_TRUE(batch.ok()) << batch.status().message();
    EXPECT_EQ(batch->train, c.batch.train);
    EXPECT_EQ(batch->micro, c.batch.micro);
    EXPECT_EQ(batch->accumulation, c.batch.accumulation);
  }
}

struct Refused {
  BatchConfig given;
  std::int64_t ranks;
  std::string names;
};

TEST(ResolveBatch, RefusesWithTheNumbers) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const Refused cases[] = {
      {{8, 2, 1}, 1, "8 is not 2 * 1 * 1 = 2"},
      {{256, 2, 18}, 7, "256 is not 2 * 18 * 7 = 252"},
      {{kNone, kNone, kNone}, 4, "train_batch_size not given"},
      {{kNone, kNone, 2}, 4, "must be given"},
      {{2, kNone, kNone}, 4, "2 is not 0 * 1 * 4 = 0"},
      {{32, 64, kNone}, 4, "32 is not 64 * 0 * 4 = 0"},
      {{33, kNone, kNone}, 4, "33 is not 8 * 1 * 4 = 32"},
      {{0, kNone, kNone}, 4, "at least 1"},
      {{kNone, -1, kNone}, 4, "at least 1"},
      {{kNone, 4, 0}, 4, "at least 1"},
      {{32, kNone, kNone}, 0, "at least one rank"},
      {{32, kNone, kNone}, -3, "at least one rank"},
      {{kNone, kHuge, kHuge}, 4, "more than 2147483647 samples"},
      {{kNone, 1 << 30, 2}, 4, "more than 2147483647 samples"},
  };
  for (const Refused& c : cases) {
    const absl::StatusOr<Batch> batch = ResolveBatch(c.given, c.ranks);
    ASSERT_FALSE(batch.ok()) << c.names;
    EXPECT_EQ(batch.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(batch.status().message(), c.names)) << batch.status().message();
  }
}

}  // namespace
}  // namespace zeroshard
