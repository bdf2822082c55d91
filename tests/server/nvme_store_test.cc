// Rooms of jobs on drives that are full, slow, shared, or not drives at all.
#include "server/nvme_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "storage/extent_file.h"
#include "tests/storage/nvme_fixture.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Caller = NvmeStore::Caller;
using Admission = std::shared_ptr<const NvmeAdmission>;

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::vector<NvmePathConfig> Paths(std::initializer_list<std::string> names) {
  std::vector<NvmePathConfig> paths;
  for (const std::string& name : names) paths.push_back({.path = name});
  return paths;
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// What a worker of the job makes at its start.
void CreateFile(const std::string& path, uint64_t job_id, uint64_t bytes) {
  const NvmePath admitted = Admit(path);
  const ExtentIdentity identity = {.job_id = job_id, .file_bytes = bytes};
  ASSERT_TRUE(ExtentFile::Create(admitted, identity).ok());
}

// Removal is done on a thread of the store.
void WaitUntilGone(const std::string& file) {
  for (int i = 0; i < 5000 && access(file.c_str(), F_OK) == 0; ++i) usleep(1000);
  EXPECT_NE(access(file.c_str(), F_OK), 0) << file;
}

Admission AdmitAll(NvmeStore& store, const std::vector<NvmePathConfig>& paths) {
  auto admission = store.Admit(paths, Caller::kTrusted);
  EXPECT_TRUE(admission.ok()) << admission.status();
  return admission.ok() ? *admission : nullptr;
}

TEST(NvmeStore, RefusesWhatWillNotDo) {
  DiskDir dir;
  NvmeStore store({});
  std::ofstream(dir.path() + "/file") << "x";
  EXPECT_EQ(store.Admit(Paths({dir.path() + "/missing"}), Caller::kTrusted).status().code(),
            absl::StatusCode::kNotFound);
  const absl::Status file =
      store.Admit(Paths({dir.path(), dir.path() + "/file"}), Caller::kTrusted).status();
  EXPECT_EQ(file.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(file), AllOf(HasSubstr(dir.path() + "/file"), HasSubstr("not a directory")));
}

TEST(NvmeStore, ANetworkFileSystemIsRefusedUnlessItIsAllowed) {
  DiskDir dir;
  NvmeStore::Options options;
  options.admit = [](const std::string& path,
                     const NvmePathOptions& how) -> absl::StatusOr<NvmePath> {
    const FileSystemKind nfs = {.place = FileSystemPlace::kNetwork, .name = "nfs"};
    absl::StatusOr<std::string> warning = JudgeFileSystem(path, nfs, how);
    if (!warning.ok()) return warning.status();
    NvmePath admitted = Admit(path);
    admitted.warnings.push_back(*std::move(warning));
    return admitted;
  };
  NvmeStore store(options);
  std::vector<NvmePathConfig> paths = Paths({dir.path()});
  EXPECT_EQ(store.Admit(paths, Caller::kTrusted).status().code(),
            absl::StatusCode::kInvalidArgument);
  paths.front().allow_network_path = true;
  const auto admission = store.Admit(paths, Caller::kTrusted);
  ASSERT_TRUE(admission.ok()) << admission.status();
  EXPECT_THAT((*admission)->warnings, testing::Contains(HasSubstr("network file system")));
}

TEST(NvmeStore, APathThatHangsIsRefusedAndHoldsUpNobodyElse) {
  DiskDir hung;
  DiskDir well;
  auto release = std::make_shared<absl::Notification>();
  auto busy = std::make_shared<std::atomic<int>>(0);
  NvmeStore::Options options;
  options.patience = absl::Milliseconds(300);
  options.admit = [release, busy, path = hung.path()](const std::string& asked,
                                                      const NvmePathOptions& how) {
    ++*busy;
    const absl::Cleanup leave = [&] { --*busy; };
    if (asked == path) release->WaitForNotification();
    return AdmitNvmePath(asked, how);
  };
  {
    NvmeStore store(options);
    for (int i = 0; i < 2; ++i) {
      const absl::Status refused = store.Admit(Paths({hung.path()}), Caller::kTrusted).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(Message(refused), AllOf(HasSubstr(hung.path()), HasSubstr("hangs")));
    }
    EXPECT_TRUE(store.Admit(Paths({well.path()}), Caller::kTrusted).ok());
  }
  release->Notify();  // its thread outlives the store, and must not outlive the directory
  for (int i = 0; i < 5000 && *busy > 0; ++i) usleep(1000);
  EXPECT_EQ(*busy, 0);
}

TEST(NvmeStore, OnlyTheDaemonsUserMayFollowLinksBelowItsPaths) {
  DiskDir own;
  DiskDir elsewhere;
  ASSERT_EQ(symlink(elsewhere.path().c_str(), (own.path() + "/link").c_str()), 0);
  NvmeStore store({});
  store.Open(Paths({own.path()}));
  const auto link = Paths({own.path() + "/link"});
  EXPECT_EQ(store.Admit(link, Caller::kOther).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(store.Admit(link, Caller::kTrusted).ok());
}

TEST(NvmeStore, TwoDaemonsDoNotShareAPath) {
  DiskDir dir;
  NvmeStore first({});
  const Admission held = AdmitAll(first, Paths({dir.path()}));
  NvmeStore second({});
  EXPECT_EQ(second.Admit(Paths({dir.path()}), Caller::kTrusted).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(NvmeStore, OneDirectoryUnderTwoNamesHasOneLock) {
  DiskDir dir;
  const std::string link = dir.path() + "-link";
  ASSERT_EQ(symlink(dir.path().c_str(), link.c_str()), 0);
  NvmeStore store({});
  const Admission both = AdmitAll(store, Paths({dir.path(), link}));
  EXPECT_NE(both, nullptr);
  unlink(link.c_str());
}

TEST(NvmeStore, APathThatNoJobUsesIsLetGo) {
  DiskDir dir;
  NvmeStore store({});
  AdmitAll(store, Paths({dir.path()}));
  EXPECT_THAT(store.Paths(), IsEmpty());
  NvmeStore other({});
  EXPECT_TRUE(other.Admit(Paths({dir.path()}), Caller::kTrusted).ok());
}

TEST(NvmeStore, PromisesCountUntilTheFilesAreGone) {
  DiskDir dir;
  NvmeStore store({});
  Admission admission = AdmitAll(store, Paths({dir.path()}));
  const uint64_t room = admission->space[0].free;
  const std::vector<uint64_t> most = {room - room / 4};
  auto first = store.Reserve("one", 1, admission, most);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(store.promised(), most[0]);
  const absl::Status refused = store.Reserve("two", 2, admission, most).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(refused),
              AllOf(HasSubstr("job 'two'"), HasSubstr(dir.path()), HasSubstr(absl::StrCat(most[0])),
                    HasSubstr("of which other jobs have yet to use")));
  CreateFile(dir.path(), 1, kMiB);
  // What is written is not free any more, and is not counted twice.
  admission = AdmitAll(store, Paths({dir.path()}));
  EXPECT_GE(admission->space[0].occupied, kMiB);
  const std::string file = dir.Own(ExtentFileName(1, 0, 0));
  EXPECT_EQ(access(file.c_str(), F_OK), 0);
  first->reset();
  WaitUntilGone(file);
  for (int i = 0; i < 5000 && store.promised() > 0; ++i) usleep(1000);
  EXPECT_EQ(store.promised(), 0u);
  EXPECT_TRUE(store.Reserve("two", 2, admission, most).ok());
}

TEST(NvmeStore, TwoPathsOfOneFileSystemShareItsRoom) {
  DiskDir one;
  DiskDir two;
  NvmeStore store({});
  const Admission admission = AdmitAll(store, Paths({one.path(), two.path()}));
  const uint64_t most = admission->space[0].free / 4 * 3;
  EXPECT_EQ(store.Reserve("big", 1, admission, std::vector<uint64_t>{most, most}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(store.Reserve("fits", 2, admission, std::vector<uint64_t>{most / 2, most / 2}).ok());
}

TEST(NvmeStore, TheDaemonsLimitHoldsForAllJobsTogether) {
  DiskDir dir;
  NvmeStore::Options options;
  options.limit = 3 * kMiB;
  NvmeStore store(options);
  const Admission admission = AdmitAll(store, Paths({dir.path()}));
  const auto first = store.Reserve("one", 1, admission, std::vector<uint64_t>{2 * kMiB});
  ASSERT_TRUE(first.ok());
  const absl::Status refused =
      store.Reserve("two", 2, admission, std::vector<uint64_t>{2 * kMiB}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(refused), AllOf(HasSubstr("needs 2.00 MiB"), HasSubstr("nvme_limit is 3.00"),
                                      HasSubstr("other jobs hold 2.00 MiB")));
}

TEST(NvmeStore, TheEndOfOneJobLeavesTheFilesOfOthersAndOfStrangers) {
  DiskDir dir;
  NvmeStore store({});
  const Admission admission = AdmitAll(store, Paths({dir.path()}));
  auto first = store.Reserve("one", 1, admission, std::vector<uint64_t>{kMiB});
  auto second = store.Reserve("two", 2, admission, std::vector<uint64_t>{kMiB});
  ASSERT_TRUE(first.ok() && second.ok());
  CreateFile(dir.path(), 1, kMiB);
  CreateFile(dir.path(), 2, kMiB);
  std::ofstream(dir.Own("job-0000000000000001.w9.p9.extent")) << "not ours";
  std::ofstream(dir.path() + "/thesis.txt") << "a user's";
  std::ofstream(dir.Own(".tmp-job-0000000000000001.w1.p0.extent-12")) << "half made";
  first->reset();
  WaitUntilGone(dir.Own(ExtentFileName(1, 0, 0)));
  WaitUntilGone(dir.Own(".tmp-job-0000000000000001.w1.p0.extent-12"));
  EXPECT_EQ(access(dir.Own(ExtentFileName(2, 0, 0)).c_str(), F_OK), 0);
  EXPECT_EQ(access(dir.Own("job-0000000000000001.w9.p9.extent").c_str(), F_OK), 0);
  EXPECT_EQ(access((dir.path() + "/thesis.txt").c_str(), F_OK), 0);
}

TEST(NvmeStore, TheNextDaemonRemovesWhatTheLastOneLeft) {
  DiskDir dir;
  CreateFile(dir.path(), 7, kMiB);
  CreateFile(dir.path(), 8, kMiB);
  std::ofstream(dir.Own(".tmp-job-0000000000000007.w1.p0.extent-12")) << "half made";
  std::ofstream(dir.Own("photo.jpg")) << "a user's";
  std::ofstream(dir.Own(ManifestFileName(8, 0))) << std::string(8192, '\0');
  NvmeStore store({});
  store.Open(Paths({dir.path(), dir.path() + "/missing"}));
  EXPECT_NE(access(dir.Own(ExtentFileName(7, 0, 0)).c_str(), F_OK), 0);
  EXPECT_NE(access(dir.Own(".tmp-job-0000000000000007.w1.p0.extent-12").c_str(), F_OK), 0);
  EXPECT_EQ(access(dir.Own("photo.jpg").c_str(), F_OK), 0);
  // With durability power the files are all that is left of the job.
  EXPECT_EQ(access(dir.Own(ExtentFileName(8, 0, 0)).c_str(), F_OK), 0);
  ASSERT_EQ(store.Paths().size(), 1u);
  EXPECT_EQ(store.Paths()[0].path, dir.path());
  auto files = store.Files(NvmeStore::Stale::kKeep);
  ASSERT_TRUE(files.ok()) << files.status();
  ASSERT_EQ(files->size(), 3u);
  EXPECT_EQ((*files)[0].file.kind, NvmeFileKind::kLive) << "its job can be resumed";
  files = store.Files(NvmeStore::Stale::kRemove);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_FALSE((*files)[0].removed);
  EXPECT_FALSE((*files)[2].removed) << (*files)[2].file.name;
  EXPECT_EQ(store.kept(), std::set<uint64_t>{8});
  EXPECT_EQ(store.Paths()[0].promised > 0, true);
  store.RemoveKept("job-8", 8, {});
  for (int i = 0; i < 500 && store.promised() > 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(store.Files(NvmeStore::Stale::kKeep)->size(), 1u);
}

}  // namespace
}  // namespace zeroshard
