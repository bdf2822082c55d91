#include "base/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<int>> MakeInt(bool fail) {
  if (fail) return absl::NotFoundError("no int");
  return std::make_unique<int>(7);
}

absl::StatusOr<int> UseMacros(bool fail_first, bool fail_second) {
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<int> value, MakeInt(fail_first));
  int copy = 0;
  ZS_ASSIGN_OR_RETURN(copy, absl::StatusOr<int>(*value));
  ZS_RETURN_IF_ERROR(fail_second ? absl::DataLossError("second") : absl::OkStatus());
  return copy;
}

TEST(StatusTest, MacrosReturnTheFirstFailure) {
  EXPECT_EQ(UseMacros(false, false).value(), 7);
  EXPECT_EQ(UseMacros(true, true).status(), absl::NotFoundError("no int"));
  EXPECT_EQ(UseMacros(false, true).status(), absl::DataLossError("second"));
}

TEST(StatusTest, ErrnoErrorNamesOperationObjectAndErrno) {
  const absl::Status status = ErrnoError(ENOENT, "open", "/no/such");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "open /no/such: No such file or directory (errno 2)");
  EXPECT_EQ(ErrnoOf(status), ENOENT);
  EXPECT_THAT(std::string(ErrnoErrorAt(EIO, "read", "/f", 4096).message()),
              HasSubstr("/f at offset 4096"));
}

TEST(StatusTest, ErrnoClasses) {
  EXPECT_EQ(ErrnoError(-EIO, "read", "f").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrnoError(ENODEV, "write", "f").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrnoError(ENODATA, "read", "f").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ErrnoError(EUCLEAN, "read", "f").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ErrnoError(ENOSPC, "write", "f").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrnoError(EPIPE, "send", "s").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrnoError(EACCES, "open", "f").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrnoError(EISDIR, "open", "f").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(IsRetryable(ErrnoError(EAGAIN, "read", "f")));
  EXPECT_FALSE(IsRetryable(ErrnoError(EBADMSG, "read", "f")));
}

TEST(StatusTest, AnnotateKeepsCodeAndErrno) {
  const absl::Status status = Annotate(ErrnoError(ENOSPC, "write", "f"), "job gpt");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrnoOf(status), ENOSPC);
  EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("job gpt: write f"));
  EXPECT_TRUE(Annotate(absl::OkStatus(), "x").ok());
  EXPECT_EQ(ErrnoOf(absl::InternalError("x")), std::nullopt);
}

TEST(StatusTest, KeepFirstErrorSticks) {
  absl::Status first;
  KeepFirstError(first, absl::OkStatus());
  EXPECT_TRUE(first.ok());
  KeepFirstError(first, absl::InternalError("a"));
  KeepFirstError(first, absl::InternalError("b"));
  EXPECT_EQ(first, absl::InternalError("a"));
}

}  // namespace
}  // namespace zeroshard
