#include "storage/io_transfer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "storage/io_transfer_table.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

std::byte* const kMemory = reinterpret_cast<std::byte*>(uintptr_t{0x10000});

IoTransfer Transfer(IoOperation operation, size_t bytes, uint64_t offset = 0) {
  return {.operation = operation, .fd = 900, .memory = kMemory, .bytes = bytes, .offset = offset};
}

TEST(TransferProgress, AWholeAnswerEndsIt) {
  TransferProgress progress(Transfer(IoOperation::kWrite, 8192));
  EXPECT_EQ(progress.Advance(8192), absl::OkStatus());
}

// As seen on a disk: 1,047,576 of 1,048,576 bytes, which is no multiple of a sector.
TEST(TransferProgress, WhatFollowsAShortAnswerIsAligned) {
  TransferProgress progress(Transfer(IoOperation::kWrite, 1048576, 4096));
  EXPECT_EQ(progress.Advance(1047576), std::nullopt);
  EXPECT_EQ(progress.offset(), 4096u + 1044480);
  EXPECT_EQ(progress.memory(), kMemory + 1044480);
  EXPECT_EQ(progress.bytes(), 4096u);
  EXPECT_EQ(progress.Advance(4096), absl::OkStatus());
}

TEST(TransferProgress, AShortAnswerWithinAPageIsTakenAsItIs) {
  TransferProgress progress(Transfer(IoOperation::kWrite, 5000, 100));
  EXPECT_EQ(progress.Advance(50), std::nullopt);
  EXPECT_EQ(progress.offset(), 150u);
  EXPECT_EQ(progress.bytes(), 4950u);
  EXPECT_EQ(progress.Advance(4000), std::nullopt);
  EXPECT_EQ(progress.offset(), 4096u);
  EXPECT_EQ(progress.Advance(1), std::nullopt);
  EXPECT_EQ(progress.offset(), 4097u) << "every answer above zero makes progress";
  EXPECT_EQ(progress.Advance(1003), absl::OkStatus());
}

TEST(TransferProgress, LargeTransfersAreAskedForInParts) {
  TransferProgress progress(Transfer(IoOperation::kWrite, (size_t{5} << 29) + 4096));
  EXPECT_EQ(progress.bytes(), size_t{1} << 30);
  EXPECT_EQ(progress.Advance(int64_t{1} << 30), std::nullopt);
  EXPECT_EQ(progress.Advance(int64_t{1} << 30), std::nullopt);
  EXPECT_EQ(progress.bytes(), (size_t{1} << 29) + 4096);
  EXPECT_EQ(progress.Advance((int64_t{1} << 29) + 4096), absl::OkStatus());
}

TEST(TransferProgress, AnInterruptionIsNoAnswer) {
  TransferProgress progress(Transfer(IoOperation::kSync, 0));
  EXPECT_EQ(progress.Advance(-EINTR), std::nullopt);
  EXPECT_EQ(progress.Advance(0), absl::OkStatus());
}

TEST(TransferProgress, ErrorsNameThePlaceReached) {
  TransferProgress progress(Transfer(IoOperation::kWrite, 16384, 4096));
  EXPECT_EQ(progress.Advance(8192), std::nullopt);
  const std::optional<absl::Status> status = progress.Advance(-EIO);
  ASSERT_TRUE(status.has_value());
  EXPECT_TRUE(absl::IsUnavailable(*status));
  EXPECT_THAT(std::string(status->message()), HasSubstr("write descriptor 900 at offset 12288"));
}

TEST(TransferProgress, AnswersThatCannotBeAreErrors) {
  for (const int64_t result : {int64_t{0}, int64_t{4097}, int64_t{1} << 40}) {
    TransferProgress progress(Transfer(IoOperation::kWrite, 4096));
    const std::optional<absl::Status> status = progress.Advance(result);
    ASSERT_TRUE(status.has_value()) << result;
    EXPECT_TRUE(absl::IsUnavailable(*status)) << *status;
  }
}

TEST(TransferProgress, AShortReadAtTheEndOfTheFileIsDataLossAtOnce) {
  const UniqueFd file(::memfd_create("short", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), 6000), 0);
  IoTransfer transfer = Transfer(IoOperation::kRead, 8192);
  transfer.fd = file.get();
  TransferProgress at_end(transfer);
  const std::optional<absl::Status> status = at_end.Advance(6000);
  ASSERT_TRUE(status.has_value());
  EXPECT_TRUE(absl::IsDataLoss(*status)) << *status;
  EXPECT_THAT(std::string(status->message()), HasSubstr("at offset 6000: the file ends"));
  TransferProgress inside(transfer);
  EXPECT_EQ(inside.Advance(4096), std::nullopt);
}

TEST(IoTransferTable, ReportsATransferOnceHoweverItEnds) {
  IoTransferTable table(2);
  IoTransfer late = Transfer(IoOperation::kWrite, 4096);
  late.tag = 5;
  late.deadline = Deadline::After(absl::ZeroDuration());
  const uint32_t slot = table.Admit(late).value();
  EXPECT_EQ(table.Expire(), std::vector<uint32_t>{slot});
  EXPECT_TRUE(table.Expire().empty());
  ASSERT_EQ(table.completions(), 1u);
  EXPECT_EQ(table.in_flight(), 1u);
  EXPECT_EQ(table.unreported(), 0u);
  EXPECT_FALSE(table.Advance(slot, 512)) << "what is late is not carried on";
  EXPECT_EQ(table.in_flight(), 0u);
  const std::vector<IoCompletion> done = table.TakeCompletions();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].tag, 5u);
  EXPECT_TRUE(absl::IsDeadlineExceeded(done[0].status));
}

TEST(IoTransferTable, TheFirstFailureStays) {
  IoTransferTable table(3);
  const uint32_t slot = table.Admit(Transfer(IoOperation::kWrite, 4096)).value();
  table.FailAll(absl::UnavailableError("first"));
  table.FailAll(absl::InternalError("second"));
  EXPECT_EQ(table.TakeCompletions().size(), 1u);
  EXPECT_EQ(table.SlotsInUse(), std::vector<uint32_t>{slot});
  const absl::Status refused = table.Admit(Transfer(IoOperation::kWrite, 4096)).status();
  EXPECT_EQ(std::string(refused.message()), "the I/O queue has failed: first");
  EXPECT_TRUE(absl::IsUnavailable(refused));
}

TEST(IoTransferTable, KnowsTheNextDeadline) {
  IoTransferTable table(3);
  EXPECT_EQ(table.NextDeadline().Remaining(), absl::InfiniteDuration());
  IoTransfer transfer = Transfer(IoOperation::kWrite, 4096);
  for (const int minutes : {9, 3, 6}) {
    transfer.deadline = Deadline::After(absl::Minutes(minutes));
    ASSERT_TRUE(table.Admit(transfer).ok());
  }
  EXPECT_LE(table.NextDeadline().Remaining(), absl::Minutes(3));
  EXPECT_GT(table.NextDeadline().Remaining(), absl::Minutes(2));
}

}  // namespace
}  // namespace zeroshard
