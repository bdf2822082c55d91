#include "base/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kText[] = R"(# a comment
socket: /run/z.sock
count: 12
ratio: 0.5
verbose: true
memory: 1.5GiB
timeout: 1m30s
devices: [cpu:0, "cpu:1"]
empty:
workers:
  threads: 2
  pin: "yes"
tiers:
  - name: host
  - name: nvme
    size: 10
)";

YamlNode Parse(const std::string& text) { return YamlNode::Parse(text, "d.yaml").value(); }

template <typename T>
std::string MessageOf(const absl::StatusOr<T>& result) {
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(result.status().message());
}

TEST(YamlNodeTest, ReadsTypedValues) {
  const YamlNode node = Parse(kText);
  EXPECT_EQ(node.String("socket", "").value(), "/run/z.sock");
  EXPECT_EQ(node.Int("count", 0).value(), 12);
  EXPECT_EQ(node.Double("ratio", 0).value(), 0.5);
  EXPECT_TRUE(node.Bool("verbose", false).value());
  EXPECT_EQ(node.Bytes("memory", 0).value(), 3ull << 29);
  EXPECT_EQ(node.Duration("timeout", absl::ZeroDuration()).value(), absl::Seconds(90));
  EXPECT_THAT(node.Strings("devices").value(), ElementsAre("cpu:0", "cpu:1"));
  EXPECT_EQ(node.String("empty", "default").value(), "default");
  const YamlNode workers = node.Child("workers").value();
  EXPECT_EQ(workers.Int("threads", 0).value(), 2);
  EXPECT_EQ(workers.RequiredString("pin").value(), "yes");
  const std::vector<YamlNode> tiers = node.Children("tiers").value();
  ASSERT_EQ(tiers.size(), 2u);
  EXPECT_EQ(tiers[0].String("name", "").value(), "host");
  EXPECT_EQ(tiers[1].String("name", "").value(), "nvme");
  EXPECT_EQ(tiers[1].Bytes("size", 0).value(), 10u);
  EXPECT_TRUE(node.Finish().ok()) << node.Finish();
}

TEST(YamlNodeTest, AbsentKeysGiveTheFallback) {
  const YamlNode node = Parse("");
  EXPECT_EQ(node.Int("count", 3).value(), 3);
  EXPECT_EQ(node.Child("a")->Child("b")->String("c", "d").value(), "d");
  EXPECT_TRUE(node.Strings("list")->empty());
  EXPECT_TRUE(node.Children("list")->empty());
  EXPECT_FALSE(node.Has("count"));
  EXPECT_THAT(MessageOf(node.RequiredString("name")), HasSubstr("d.yaml: name: is required"));
  EXPECT_TRUE(node.Finish().ok());
}

TEST(YamlNodeTest, ErrorsNameFileLineKeyAndValue) {
  const YamlNode node = Parse(kText);
  EXPECT_EQ(MessageOf(node.Int("socket", 0)),
            "d.yaml:2: socket: expected a whole number, found \"/run/z.sock\"");
  EXPECT_THAT(MessageOf(node.Int("count", 0, {.min = 1, .max = 10})),
              HasSubstr("d.yaml:3: count: expected a number from 1 to 10, found 12"));
  EXPECT_THAT(MessageOf(node.Strings("workers")), HasSubstr("expected a list, found a mapping"));
  EXPECT_THAT(MessageOf(node.Child("devices")), HasSubstr("expected a mapping, found a list"));
  EXPECT_THAT(MessageOf(node.Children("devices")),
              HasSubstr("devices[0]: expected a mapping, found \"cpu:0\""));
  EXPECT_THAT(MessageOf(node.Child("workers")->Bool("pin", false)),
              HasSubstr("d.yaml:12: workers.pin: expected true or false, found \"yes\""));
  EXPECT_FALSE(node.Double("socket", 0).ok());
  EXPECT_FALSE(node.Bytes("socket", 0).ok());
  EXPECT_FALSE(node.Duration("socket", absl::ZeroDuration()).ok());
  EXPECT_FALSE(node.String("workers", "").ok());
}

TEST(YamlNodeTest, ATextMayStandForAMapping) {
  const YamlNode node = Parse("paths: [/a, {path: /b, weight: 2}]\n");
  const auto paths = node.Children("paths", "path");
  ASSERT_TRUE(paths.ok()) << paths.status();
  ASSERT_EQ(paths->size(), 2u);
  EXPECT_EQ((*paths)[0].RequiredString("path").value(), "/a");
  EXPECT_EQ((*paths)[0].Int("weight", 1).value(), 1);
  EXPECT_EQ((*paths)[1].Int("weight", 1).value(), 2);
  EXPECT_EQ((*paths)[1].RequiredString("path").value(), "/b");
  EXPECT_TRUE(node.Finish().ok()) << node.Finish();
  EXPECT_THAT(MessageOf(Parse("paths: [[/a]]\n").Children("paths", "path")),
              HasSubstr("d.yaml:1: paths[0]: expected a mapping or a text, found a list"));
}

TEST(YamlNodeTest, UnknownKeysAreReportedTogether) {
  const YamlNode node = Parse("known: 1\nsokcet: 2\nworkers:\n  thraeds: 3\n");
  ASSERT_TRUE(node.Int("known", 0).ok());
  ASSERT_TRUE(node.Child("workers").ok());
  const std::string message(node.Finish().message());
  EXPECT_THAT(message, HasSubstr("d.yaml:2: sokcet: unknown key"));
  EXPECT_THAT(message, HasSubstr("d.yaml:4: workers.thraeds: unknown key"));
}

TEST(YamlNodeTest, MalformedDocumentsAreErrors) {
  for (const char* bad : {"a: [", "- 1", "text", "a: 1\na: 2", "? [x]\n: 1", "a: *b",
                          "a: 1\n---\nb: 2\n", "a: {b: 1, b: 2}"}) {
    const absl::StatusOr<YamlNode> node = YamlNode::Parse(bad, "d.yaml");
    if (node.ok()) {
      EXPECT_FALSE(node->Child("a").ok()) << bad;
    } else {
      EXPECT_THAT(MessageOf(node), HasSubstr("d.yaml")) << bad;
    }
  }
}

// yaml-cpp's LoadAll never returned from this one.
TEST(YamlNodeTest, ATextOfEndlessDocumentsIsRefused) {
  EXPECT_THAT(MessageOf(YamlNode::Parse(",rru.n_d,r:", "d.yaml")), HasSubstr("d.yaml"));
}

TEST(ConfigFileTest, SaysWhatIsWrongWithTheFile) {
  char pattern[] = "/tmp/zs-config-XXXXXX";
  const std::string directory = ::mkdtemp(pattern);
  EXPECT_THAT(MessageOf(YamlNode::ParseFile(directory)), HasSubstr("is a directory"));
  EXPECT_EQ(YamlNode::ParseFile(directory + "/none").status().code(), absl::StatusCode::kNotFound);
  const std::string path = directory + "/c";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(MessageOf(YamlNode::ParseFile(path)), HasSubstr("not a regular file"));
  ::unlink(path.c_str());
  std::ofstream(path) << "a: 1\n";
  EXPECT_EQ(YamlNode::ParseFile(path)->Int("a", 0).value(), 1);
  EXPECT_THAT(MessageOf(ReadConfigFile(path, 4)), HasSubstr("longer than the limit of 4 bytes"));
  EXPECT_EQ(ReadConfigFile(path, 5).value(), "a: 1\n");
  ::unlink(path.c_str());
  ::rmdir(directory.c_str());
}

TEST(ConfigTest, ByteSizes) {
  EXPECT_EQ(ParseByteSize("4096").value(), 4096u);
  EXPECT_EQ(ParseByteSize("64KiB").value(), 65536u);
  EXPECT_EQ(ParseByteSize("2GB").value(), 2'000'000'000u);
  EXPECT_EQ(ParseByteSize("1.5 MiB").value(), 3u << 19);
  EXPECT_EQ(ParseByteSize("7B").value(), 7u);
  for (const char* bad : {"", "x", "-1", "1e30", "nan", "inf", "5QiB", "GiB"}) {
    EXPECT_FALSE(ParseByteSize(bad).ok()) << bad;
  }
}

TEST(ConfigTest, Environment) {
  ::unsetenv("ZS_TEST_VARIABLE");
  EXPECT_EQ(Env("ZS_TEST_VARIABLE"), std::nullopt);
  ::setenv("ZS_TEST_VARIABLE", "x", 1);
  EXPECT_EQ(Env("ZS_TEST_VARIABLE"), "x");
  ::unsetenv("ZEROSHARD_FAULTS");
  EXPECT_TRUE(ArmFaultPointsFromEnv().ok());
  ::setenv("ZEROSHARD_FAULTS", "broken", 1);
  EXPECT_THAT(std::string(ArmFaultPointsFromEnv().message()), HasSubstr("ZEROSHARD_FAULTS: "));
  ::unsetenv("ZEROSHARD_FAULTS");
}

TEST(ConfigTest, ListsFaultPointsOnRequest) {
  ::setenv("ZEROSHARD_FAULTS", "list", 1);
  EXPECT_EXIT(static_cast<void>(ArmFaultPointsFromEnv()), ::testing::ExitedWithCode(0), "");
  ::unsetenv("ZEROSHARD_FAULTS");
}

}  // namespace
}  // namespace zeroshard
