#include "device/cpu/stream_copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace zeroshard {
namespace {

TEST(StreamCopyTest, CopiesEveryLengthAtEveryAlignmentAndNothingElse) {
  std::vector<unsigned char> source(4096);
  for (size_t i = 0; i < source.size(); ++i)
    source[i] = static_cast<unsigned char>(i * 31 + i / 256);
  for (size_t length : {0, 1, 63, 64, 65, 127, 128, 1000, 2048}) {
    for (size_t from = 0; from < 70; from += 3) {
      for (size_t to = 0; to < 70; ++to) {
        std::vector<unsigned char> target(2300, 0xee);
        StreamCopy(target.data() + to, source.data() + from, length);
        for (size_t i = 0; i < target.size(); ++i) {
          const bool inside = i >= to && i < to + length;
          ASSERT_EQ(target[i], inside ? source[from + i - to] : 0xee)
              << "length " << length << " from " << from << " to " << to << " at " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
