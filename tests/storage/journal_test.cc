#include "storage/journal.h"

#include <sys/resource.h>

#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/strings.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Payloads = std::vector<std::string>;

constexpr char kName[] = "journal";

struct Opened {
  std::unique_ptr<Journal> journal;
  Payloads records;
  absl::Status status;
};

Opened OpenJournal(const TempDir& dir) {
  Opened opened;
  auto journal = Journal::Open(dir.fd(), kName, [&](uint64_t, std::string_view payload) {
    opened.records.emplace_back(payload);
    return absl::OkStatus();
  });
  opened.status = journal.status();
  if (journal.ok()) opened.journal = *std::move(journal);
  return opened;
}

// Text without zeros that spans several sectors for large sizes.
std::string Text(size_t size, char first = 'a') {
  std::string text;
  for (size_t i = 0; i < size; ++i) text.push_back(static_cast<char>(first + i % 26));
  return text;
}

Payloads ThreeRecords() { return {Text(5), Text(1200, 'A'), Text(464)}; }

// Writes a journal and returns its bytes and the offset after each record.
std::string WriteJournal(const TempDir& dir, const Payloads& payloads,
                         std::vector<uint64_t>& ends) {
  Opened opened = OpenJournal(dir);
  EXPECT_TRUE(opened.status.ok()) << opened.status;
  ends.push_back(opened.journal->bytes());
  for (const std::string& payload : payloads) {
    EXPECT_TRUE(opened.journal->Append(payload).ok());
    ends.push_back(opened.journal->bytes());
  }
  return dir.Read(kName);
}

TEST(JournalTest, RecordsComeBackInOrder) {
  TempDir dir;
  std::vector<uint64_t> ends;
  WriteJournal(dir, ThreeRecords(), ends);
  Opened opened = OpenJournal(dir);
  ASSERT_TRUE(opened.status.ok()) << opened.status;
  EXPECT_EQ(opened.records, ThreeRecords());
  EXPECT_EQ(opened.journal->recovery().records, 3u);
  EXPECT_EQ(opened.journal->recovery().cut_bytes, 0u);
  EXPECT_EQ(opened.journal->next_sequence(), 4u);
  ASSERT_TRUE(opened.journal->Append("more").ok());
  opened.journal.reset();
  EXPECT_EQ(OpenJournal(dir).records.size(), 4u);
}

TEST(JournalTest, PayloadsOfEverySizeAroundASector) {
  TempDir dir;
  Payloads payloads;
  for (size_t size = 460; size <= 530; ++size) payloads.push_back(Text(size));
  std::vector<uint64_t> ends;
  const std::string bytes = WriteJournal(dir, payloads, ends);
  EXPECT_EQ(bytes.size() % 512, 0u);
  EXPECT_EQ(OpenJournal(dir).records, payloads);
}

TEST(JournalTest, CutAtEveryByteKeepsAllWholeRecords) {
  TempDir dir;
  std::vector<uint64_t> ends;
  const std::string bytes = WriteJournal(dir, ThreeRecords(), ends);
  for (size_t size = 0; size < bytes.size(); ++size) {
    dir.Write(kName, bytes.substr(0, size));
    Opened opened = OpenJournal(dir);
    if (size < ends[0]) {
      EXPECT_EQ(opened.status.code(), absl::StatusCode::kDataLoss) << size;
      continue;
    }
    size_t whole = 0;
    while (ends[whole + 1] <= size) ++whole;
    ASSERT_TRUE(opened.status.ok()) << size << ": " << opened.status;
    EXPECT_EQ(opened.records.size(), whole);
    EXPECT_EQ(opened.journal->recovery().cut_bytes, size - ends[whole]);
    EXPECT_EQ(opened.journal->bytes(), ends[whole]);
    ASSERT_TRUE(opened.journal->Append("next").ok());
    opened.journal.reset();
    EXPECT_EQ(OpenJournal(dir).records.back(), "next");
  }
}

TEST(JournalTest, AFlipInEveryByteIsFoundAndTheFileIsLeftAlone) {
  TempDir dir;
  std::vector<uint64_t> ends;
  const std::string bytes = WriteJournal(dir, ThreeRecords(), ends);
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    dir.Write(kName, damaged);
    const Opened opened = OpenJournal(dir);
    // A flip in the magic makes it another kind of file.
    const auto code = i < 8 ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kDataLoss;
    ASSERT_EQ(opened.status.code(), code) << i;
    size_t record = 0;
    while (ends[record] <= i) ++record;
    const uint64_t offset = record == 0 ? 0 : ends[record - 1];
    if (i >= 8) {
      EXPECT_THAT(std::string(opened.status.message()),
                  HasSubstr(absl::StrCat("journal at offset ", offset, ":")));
    }
    EXPECT_EQ(opened.records.size(), record == 0 ? 0 : record - 1);
    EXPECT_EQ(dir.Read(kName), damaged);
  }
}

// Sectors of an unsynced append may reach the disk in any order.
TEST(JournalTest, AnyMissingSectorOfTheLastRecordIsATornWrite) {
  TempDir dir;
  std::vector<uint64_t> ends;
  const std::string bytes = WriteJournal(dir, {Text(5), Text(2000)}, ends);
  const uint64_t sectors = (ends[2] - ends[1]) / 512;
  for (uint64_t missing = 1; missing < (1u << sectors); ++missing) {
    std::string torn = bytes;
    for (uint64_t s = 0; s < sectors; ++s) {
      if ((missing >> s & 1) != 0) torn.replace(ends[1] + 512 * s, 512, 512, '\0');
    }
    dir.Write(kName, torn);
    const Opened opened = OpenJournal(dir);
    ASSERT_TRUE(opened.status.ok()) << missing << ": " << opened.status;
    EXPECT_THAT(opened.records, ElementsAre(Text(5)));
    EXPECT_EQ(opened.journal->recovery().cut_bytes, ends[2] - ends[1]);
  }
}

TEST(JournalTest, AMissingSectorBeforeTheLastRecordIsLoss) {
  TempDir dir;
  std::vector<uint64_t> ends;
  const std::string bytes = WriteJournal(dir, ThreeRecords(), ends);
  for (uint64_t offset = ends[0]; offset < ends[2]; offset += 512) {
    std::string damaged = bytes;
    damaged.replace(offset, 512, 512, '\0');
    dir.Write(kName, damaged);
    EXPECT_EQ(OpenJournal(dir).status.code(), absl::StatusCode::kDataLoss) << offset;
  }
}

TEST(JournalTest, RecordsOfAnotherJournalAreNotTaken) {
  TempDir dir;
  TempDir other;
  std::vector<uint64_t> ends;
  const std::string bytes = WriteJournal(dir, ThreeRecords(), ends);
  std::vector<uint64_t> other_ends;
  const std::string foreign = WriteJournal(other, ThreeRecords(), other_ends);
  dir.Write(kName, bytes.substr(0, ends[1]) + foreign.substr(ends[1]));
  EXPECT_THAT(std::string(OpenJournal(dir).status.message()), HasSubstr("another journal"));
  // A record twice is out of order.
  dir.Write(kName, bytes.substr(0, ends[1]) + bytes.substr(ends[0]));
  EXPECT_THAT(std::string(OpenJournal(dir).status.message()), HasSubstr("out of order"));
}

TEST(JournalTest, CompactionKeepsTheSequence) {
  TempDir dir;
  {
    Opened opened = OpenJournal(dir);
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(opened.journal->Append(absl::StrCat(i)).ok());
    const uint64_t before = opened.journal->bytes();
    ASSERT_TRUE(opened.journal->Compact(Payloads{"all of it", "and this"}).ok());
    EXPECT_LT(opened.journal->bytes(), before);
    EXPECT_EQ(opened.journal->next_sequence(), 23u);
    ASSERT_TRUE(opened.journal->Append("later").ok());
  }
  EXPECT_THAT(OpenJournal(dir).records, ElementsAre("all of it", "and this", "later"));
  EXPECT_EQ(dir.Count(), 1u);
}

TEST(JournalTest, ALeftoverOfACompactionIsIgnored) {
  TempDir dir;
  std::vector<uint64_t> ends;
  WriteJournal(dir, {"one"}, ends);
  dir.Write(".new-journal", "half a journal");
  Opened opened = OpenJournal(dir);
  ASSERT_TRUE(opened.status.ok()) << opened.status;
  ASSERT_TRUE(opened.journal->Compact(Payloads{"two"}).ok());
  opened.journal.reset();
  EXPECT_THAT(OpenJournal(dir).records, ElementsAre("two"));
}

TEST(JournalTest, OnlyOneHasItOpen) {
  TempDir dir;
  Opened first = OpenJournal(dir);
  ASSERT_TRUE(first.status.ok());
  EXPECT_EQ(OpenJournal(dir).status.code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(first.journal->Compact({}).ok());
  EXPECT_EQ(OpenJournal(dir).status.code(), absl::StatusCode::kFailedPrecondition);
  first.journal.reset();
  EXPECT_TRUE(OpenJournal(dir).status.ok());
}

TEST(JournalTest, RefusesWhatIsNotARecord) {
  TempDir dir;
  Opened opened = OpenJournal(dir);
  EXPECT_EQ(opened.journal->Append("").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(opened.journal->Compact(Payloads{""}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(opened.journal->Append("still fine").ok());
}

TEST(JournalTest, RefusesWhatIsNotAJournal) {
  TempDir dir;
  dir.Write(kName, Text(2000));
  EXPECT_EQ(OpenJournal(dir).status.code(), absl::StatusCode::kInvalidArgument);
  const auto journal =
      Journal::Open(dir.fd(), "../x", [](uint64_t, std::string_view) { return absl::OkStatus(); });
  EXPECT_EQ(journal.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(JournalTest, AnErrorOfTheReaderEndsTheReplay) {
  TempDir dir;
  std::vector<uint64_t> ends;
  WriteJournal(dir, ThreeRecords(), ends);
  const auto journal = Journal::Open(dir.fd(), kName, [](uint64_t sequence, std::string_view) {
    return sequence == 2 ? absl::DataLossError("cannot be parsed") : absl::OkStatus();
  });
  EXPECT_THAT(std::string(journal.status().message()),
              HasSubstr(absl::StrCat("journal at offset ", ends[1], ": cannot be parsed")));
}

TEST(JournalTest, TheFirstErrorOfAWriteSticks) {
  TempDir dir;
  Opened opened = OpenJournal(dir);
  ASSERT_TRUE(opened.journal->Append("before").ok());
  ASSERT_NE(std::signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit saved = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  rlimit small = saved;
  small.rlim_cur = opened.journal->bytes() + 100;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status first = opened.journal->Append(Text(3000));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &saved), 0);
  EXPECT_FALSE(first.ok());
  EXPECT_EQ(opened.journal->Append("after"), first);
  EXPECT_EQ(opened.journal->Compact({}), first);
  EXPECT_EQ(opened.journal->status(), first);
  opened.journal.reset();
  const Opened again = OpenJournal(dir);
  EXPECT_THAT(again.records, ElementsAre("before"));
  EXPECT_EQ(again.journal->recovery().cut_bytes, 100u);
}

#ifdef ZEROSHARD_FAULTS
// Every step of appending and compacting fails once: what was acknowledged is there, what was not
// is there whole or not at all.
TEST(JournalTest, FailAtEveryPointUntilClean) {
  for (const char* point : {"storage.file.write", "storage.file.sync", "storage.journal.rename"}) {
    bool clean = false;
    for (int k = 1; !clean && k < 50; ++k) {
      TempDir dir;
      ResetFaultPoints();
      ASSERT_TRUE(ArmFaultPoints(absl::StrCat(point, "=return:", k)).ok());
      Opened opened = OpenJournal(dir);
      bool kept = opened.status.ok() && opened.journal->Append("kept").ok();
      const bool compacted = kept && opened.journal->Compact(Payloads{"kept", "compacted"}).ok();
      clean = compacted && opened.journal->Append("last").ok();
      opened.journal.reset();
      ResetFaultPoints();
      const Opened again = OpenJournal(dir);
      ASSERT_TRUE(again.status.ok()) << point << " " << k << ": " << again.status;
      if (kept) {
        ASSERT_EQ(again.records.at(0), "kept");
      }
      if (compacted) {
        ASSERT_EQ(again.records.at(1), "compacted");
      }
      if (clean) {
        ASSERT_EQ(again.records.at(2), "last");
      }
    }
    EXPECT_TRUE(clean) << point;
  }
}
#endif

}  // namespace
}  // namespace zeroshard
