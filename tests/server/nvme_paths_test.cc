#include "server/nvme_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

const std::vector<NvmePathConfig> kDaemon = {
    {"/nvme0", 2, false}, {"/nvme1", 3, true}, {"/nvme1/inner", 5, false}};

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(NvmePaths, AreNormalised) {
  const std::pair<const char*, const char*> cases[] = {
      {"/a", "/a"},         {"/a/", "/a"}, {"//a///b/", "/a/b"}, {"/a/./b/.", "/a/b"},
      {"/a b=c", "/a b=c"}, {"/", "/"},    {"/./", "/"},         {"/..a/b..", "/..a/b.."}};
  for (const auto& [text, path] : cases) {
    const auto normalised = NormaliseNvmePath(text);
    ASSERT_TRUE(normalised.ok()) << normalised.status();
    EXPECT_EQ(*normalised, path) << text;
    EXPECT_EQ(*NormaliseNvmePath(*normalised), path);
  }
}

TEST(NvmePaths, OthersAreRefusedWithWhatWasFound) {
  const std::string long_path = "/" + std::string(4096, 'x');
  const std::string zero("/a\0b", 4);
  for (const std::string& text : std::vector<std::string>{
           "", "a/b", "./a", "~/a", "none", "/a/../b", "/..", "/a\nb", zero, long_path}) {
    const auto path = NormaliseNvmePath(text);
    EXPECT_EQ(path.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(Message(path.status()),
                AllOf(HasSubstr("expected an absolute path"), HasSubstr("found \"")));
    EXPECT_LT(path.status().message().size(), 400u);
  }
}

TEST(NvmePaths, AFlagMayHaveAWeight) {
  EXPECT_EQ(*ParseNvmePath("/a/"), (NvmePathConfig{"/a", 1, false}));
  EXPECT_EQ(*ParseNvmePath("/a=7"), (NvmePathConfig{"/a", 7, false}));
  EXPECT_EQ(*ParseNvmePath("/a=b=7"), (NvmePathConfig{"/a=b", 7, false}));
  for (const char* bad :
       {"", "=3", "a=3", "/a=", "/a=0", "/a=-1", "/a=fast", "/a=1.5", "/a=999999999999999999"}) {
    EXPECT_EQ(ParseNvmePath(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(NvmePaths, AListNamesNonePathTwice) {
  EXPECT_TRUE(CheckNvmePaths(kDaemon).ok());
  EXPECT_TRUE(CheckNvmePaths({}).ok());
  EXPECT_THAT(Message(CheckNvmePaths(std::vector<NvmePathConfig>{{"/a"}, {"/b"}, {"/a", 2}})),
              HasSubstr("\"/a\" is named twice"));
  EXPECT_THAT(Message(CheckNvmePaths(std::vector<NvmePathConfig>{{"/a", 0}})),
              HasSubstr("/a: expected a weight from 1"));
  std::vector<NvmePathConfig> many;
  for (int i = 0; i < 65; ++i) many.push_back({absl::StrCat("/", i)});
  EXPECT_THAT(Message(CheckNvmePaths(many)), HasSubstr("at most 64 paths, found 65"));
}

TEST(NvmePaths, AJobWithoutOneUsesAll) {
  for (const PathRight right : {PathRight::kListed, PathRight::kAny}) {
    const auto paths = PathsOfJob("", kDaemon, right);
    ASSERT_TRUE(paths.ok()) << paths.status();
    EXPECT_THAT(*paths, ElementsAreArray(kDaemon));
    const auto none = PathsOfJob("", {}, right);
    EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(none.status()), HasSubstr("--nvme-path"));
  }
}

TEST(NvmePaths, APathOfTheListOrBeneathHasItsWeight) {
  struct Case {
    const char* wanted;
    NvmePathConfig path;
  };
  const Case cases[] = {{"/nvme0", {"/nvme0", 2, false}},
                        {"/nvme0/", {"/nvme0", 2, false}},
                        {"/nvme0/alice/run", {"/nvme0/alice/run", 2, false}},
                        {"/nvme1//bob", {"/nvme1/bob", 3, true}},
                        {"/nvme1/inner/x", {"/nvme1/inner/x", 5, false}},
                        {"/nvme1/inner2", {"/nvme1/inner2", 3, true}}};
  for (const Case& one : cases) {
    for (const PathRight right : {PathRight::kListed, PathRight::kAny}) {
      const auto paths = PathsOfJob(one.wanted, kDaemon, right);
      ASSERT_TRUE(paths.ok()) << paths.status();
      EXPECT_THAT(*paths, ElementsAre(one.path)) << one.wanted;
    }
  }
  EXPECT_TRUE(PathsOfJob("/x", std::vector<NvmePathConfig>{{"/"}}, PathRight::kListed).ok());
}

TEST(NvmePaths, AnotherDirectoryIsForTheDaemonsUserAndRoot) {
  for (const char* wanted : {"/home/alice", "/nvme", "/nvme00", "/", "/nvme2/inner"}) {
    const auto refused = PathsOfJob(wanted, kDaemon, PathRight::kListed);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied) << wanted;
    EXPECT_THAT(Message(refused.status()),
                AllOf(HasSubstr(absl::StrCat("\"", wanted, "\"")), HasSubstr("nvme_paths"),
                      HasSubstr("\"/nvme1/inner\"")));
    const auto taken = PathsOfJob(wanted, kDaemon, PathRight::kAny);
    ASSERT_TRUE(taken.ok()) << taken.status();
    EXPECT_THAT(*taken, ElementsAre(NvmePathConfig{wanted, 1, false}));
  }
  EXPECT_THAT(Message(PathsOfJob("/x", {}, PathRight::kListed).status()), HasSubstr("it has none"));
}

TEST(NvmePaths, NoWayOutOfTheList) {
  for (const PathRight right : {PathRight::kListed, PathRight::kAny}) {
    for (const char* wanted : {"/nvme0/../etc", "nvme0", "/nvme0/.."}) {
      EXPECT_EQ(PathsOfJob(wanted, kDaemon, right).status().code(),
                absl::StatusCode::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace zeroshard
