#include "base/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <utility>

#include "base/status.h"

namespace zeroshard {
namespace {

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

UniqueFd OpenNull() { return UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)); }

TEST(UniqueFdTest, ClosesWhenDestroyedOrReplaced) {
  int raw = -1;
  {
    UniqueFd fd = OpenNull();
    raw = fd.get();
    EXPECT_TRUE(IsOpen(raw));
    UniqueFd moved = std::move(fd);
    EXPECT_FALSE(fd.valid());  // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(moved.get(), raw);
  }
  EXPECT_FALSE(IsOpen(raw));
}

TEST(UniqueFdTest, ReleaseKeepsItOpen) {
  UniqueFd fd = OpenNull();
  const int raw = fd.release();
  EXPECT_FALSE(fd.valid());
  EXPECT_TRUE(IsOpen(raw));
  fd.reset(raw);
}

TEST(UniqueFdTest, CloseReportsErrors) {
  EXPECT_TRUE(OpenNull().Close().ok());
  EXPECT_TRUE(UniqueFd().Close().ok());
  UniqueFd bad(1 << 20);
  EXPECT_EQ(ErrnoOf(std::move(bad).Close()), EBADF);
}

TEST(UniqueFdTest, DuplicateIsCloseOnExec) {
  const UniqueFd fd = OpenNull();
  const absl::StatusOr<UniqueFd> copy = fd.Duplicate();
  ASSERT_TRUE(copy.ok());
  EXPECT_NE(copy->get(), fd.get());
  EXPECT_EQ(::fcntl(copy->get(), F_GETFD), FD_CLOEXEC);
  EXPECT_FALSE(UniqueFd().Duplicate().ok());
}

}  // namespace
}  // namespace zeroshard
