#include "server/daemon_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string WriteFile(const std::string& text) {
  const std::string path = testing::TempDir() + "/zeroshardd.yaml";
  std::ofstream(path) << text;
  return path;
}

absl::StatusOr<DaemonConfig> Load(const std::string& text) {
  DaemonFlags flags;
  flags.config_file = WriteFile(text);
  return LoadDaemonConfig(flags);
}

TEST(DaemonConfig, ReadsEveryKey) {
  const auto config = Load(R"(
run_dir: /run/z
state_dir: /var/z/state
checkpoint_dir: /data/checkpoints
export_dir: /data/exports
worker_binary: /usr/libexec/zeroshard-worker
devices: ["cpu:0", "cpu:1"]
metrics_address: "127.0.0.1:9000"
gloo_address: "10.0.0.1"
host_memory_limit: 64GiB
lanes_per_worker: 8
attach_timeout: 10s
collective_timeout: 90s
rejoin_timeout: 5m
allow_uids: [1000, 1001]
log_level: debug
)");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->run_dir, "/run/z");
  EXPECT_THAT(config->devices, ElementsAre("cpu:0", "cpu:1"));
  EXPECT_EQ(config->host_memory_limit, uint64_t{64} << 30);
  EXPECT_EQ(config->lanes_per_worker, 8u);
  EXPECT_EQ(config->rejoin_timeout, absl::Minutes(5));
  EXPECT_THAT(config->allow_uids, ElementsAre(1000u, 1001u));
  EXPECT_EQ(config->log_level, LogLevel::kDebug);
}

TEST(DaemonConfig, AnEmptyFileMeansTheDefaults) {
  const auto config = Load("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->devices, ElementsAre("cpu:0"));
  EXPECT_EQ(config->metrics_address, "127.0.0.1:9464");
  EXPECT_EQ(config->lanes_per_worker, 0u);
}

TEST(DaemonConfig, FlagsWinOverTheFile) {
  DaemonFlags flags;
  flags.config_file = WriteFile("run_dir: /run/file\ndevices: [\"cpu:0\"]\n");
  flags.run_dir = "/run/flag";
  flags.devices = {"cpu:3"};
  const auto config = LoadDaemonConfig(flags);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->run_dir, "/run/flag");
  EXPECT_THAT(config->devices, ElementsAre("cpu:3"));
}

TEST(DaemonConfig, Gpus) {
  const auto config = Load(
      "devices: [\"cuda:0\", \"cuda:3\"]\ngpu_memory_limit: 60GiB\n"
      "job_gpu_limit: 20GiB\nrun_dir: /run/z\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(KindOf(config->devices), DeviceKind::kCuda);
  EXPECT_EQ(config->gpu_memory_limit, uint64_t{60} << 30);
  EXPECT_EQ(config->job_gpu_limit, uint64_t{20} << 30);
  const auto again = Load(DaemonConfigText(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(DaemonConfigText(*again), DaemonConfigText(*config));
  EXPECT_TRUE(Load("devices: [\"cuda:all\"]\n").ok());
}

TEST(DaemonConfig, WhatItPrintsItReads) {
  const auto config =
      Load("devices: [\"cpu:0\", \"cpu:1\"]\nrun_dir: /run/z\nlanes_per_worker: 3\n");
  ASSERT_TRUE(config.ok()) << config.status();
  const auto again = Load(DaemonConfigText(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(DaemonConfigText(*again), DaemonConfigText(*config));
}

TEST(DaemonConfig, TheNvmeTier) {
  const auto config = Load(R"(
run_dir: /run/z
nvme_paths:
  - /nvme0/
  - {path: "/nvme 1", weight: 3, allow_network_path: true}
nvme_limit: 2TiB
nvme_write_budget: 1TiB
io_backend: threads
io_timeout: 5s
io_bytes_per_second: 1GiB
io_depth: 64
huge_pages: false
require_pinned: true
job_host_limit: 8GiB
job_nvme_limit: 16GiB
)");
  ASSERT_TRUE(config.ok()) << config.status();
  const TierConfig& tiers = config->tiers;
  EXPECT_THAT(tiers.nvme_paths,
              ElementsAre(NvmePathConfig{"/nvme0", 1, false}, NvmePathConfig{"/nvme 1", 3, true}));
  EXPECT_EQ(tiers.nvme_limit, uint64_t{2} << 40);
  EXPECT_EQ(tiers.nvme_write_budget, uint64_t{1} << 40);
  EXPECT_EQ(tiers.io_backend, IoBackend::kThreads);
  EXPECT_EQ(tiers.io_timeout, absl::Seconds(5));
  EXPECT_EQ(tiers.io_bytes_per_second, uint64_t{1} << 30);
  EXPECT_EQ(tiers.io_depth, 64u);
  EXPECT_FALSE(tiers.huge_pages);
  EXPECT_TRUE(tiers.require_pinned);
  EXPECT_EQ(tiers.job_host_limit, uint64_t{8} << 30);
  EXPECT_EQ(tiers.job_nvme_limit, uint64_t{16} << 30);
  const auto again = Load(DaemonConfigText(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(DaemonConfigText(*again), DaemonConfigText(*config));
  EXPECT_EQ(again->tiers.nvme_paths, tiers.nvme_paths);
}

TEST(DaemonConfig, TheNvmeTierByDefault) {
  const auto config = Load("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->tiers.nvme_paths.empty());
  EXPECT_EQ(config->tiers.io_backend, IoBackend::kAuto);
  EXPECT_EQ(config->tiers.io_timeout, absl::Seconds(30));
  EXPECT_TRUE(config->tiers.huge_pages);
  EXPECT_FALSE(config->tiers.require_pinned);
}

TEST(DaemonConfig, NvmePathFlagsReplaceTheListOfTheFile) {
  DaemonFlags flags;
  flags.config_file = WriteFile("nvme_paths: [/file]\n");
  flags.nvme_paths = {"/a", "/b=4"};
  const auto config = LoadDaemonConfig(flags);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->tiers.nvme_paths,
              ElementsAre(NvmePathConfig{"/a", 1, false}, NvmePathConfig{"/b", 4, false}));
  flags.nvme_paths = {"/a", "/a/=4"};
  EXPECT_THAT(std::string(LoadDaemonConfig(flags).status().message()),
              HasSubstr("nvme_paths: \"/a\" is named twice"));
  flags.nvme_paths = {"b=4"};
  EXPECT_THAT(std::string(LoadDaemonConfig(flags).status().message()),
              HasSubstr("--nvme-path: expected an absolute path"));
}

TEST(DaemonConfig, ACluster) {
  const auto config = Load(
      "cluster: {node: 1, addresses: [\"127.0.0.1:7401\", \"[::1]:7402\"]}\nrun_dir: /run/z\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->cluster.node, 1u);
  EXPECT_THAT(config->cluster.addresses, ElementsAre("127.0.0.1:7401", "[::1]:7402"));
  EXPECT_EQ(config->gloo_address, "::1") << "workers are where their daemon is";
  EXPECT_EQ(config->cluster.NodeName(0), "node 0 (127.0.0.1:7401)");
  const auto again = Load(DaemonConfigText(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(DaemonConfigText(*again), DaemonConfigText(*config));
}

TEST(DaemonConfig, ANetworkWithoutEncryptionMustBeAskedFor) {
  const auto config = Load(
      "cluster: {node: 0, addresses: [\"10.0.0.1:7401\", \"10.0.0.2:7401\"],"
      " allow_insecure: true}\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->gloo_address, "10.0.0.1");
}

struct BadCase {
  const char* text;
  const char* key;
  const char* found;
};

class DaemonConfigRefuses : public testing::TestWithParam<BadCase> {};

TEST_P(DaemonConfigRefuses, NamingKeyAndValue) {
  const auto config = Load(GetParam().text);
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << config.status();
  EXPECT_THAT(std::string(config.status().message()),
              AllOf(HasSubstr(GetParam().key), HasSubstr(GetParam().found)));
}

INSTANTIATE_TEST_SUITE_P(
    All, DaemonConfigRefuses,
    testing::Values(BadCase{"devices: [\"rocm:0\"]", "devices", "rocm:0"},
                    BadCase{"devices: [\"cuda:x\"]", "devices", "cuda:x"},
                    BadCase{"devices: [\"cuda:0\", \"cpu:0\"]", "devices", "two kinds"},
                    BadCase{"devices: [\"cuda:all\", \"cuda:0\"]", "devices", "no other device"},
                    BadCase{"devices: [\"cpu:00\"]", "devices", "cpu:00"},
                    BadCase{"devices: [\"cpu:-1\"]", "devices", "cpu:-1"},
                    BadCase{"devices: []", "devices", "at least one"},
                    BadCase{"devices: [\"cpu:0\", \"cpu:0\"]", "devices", "twice"},
                    BadCase{"devices: \"cpu:0\"", "devices", "list"},
                    BadCase{"run_dir: relative", "run_dir", "relative"},
                    BadCase{"attach_timeout: never", "attach_timeout", "never"},
                    BadCase{"attach_timeout: 0s", "attach_timeout", "0"},
                    BadCase{"lanes_per_worker: 0", "lanes_per_worker", "0"},
                    BadCase{"lanes_per_worker: many", "lanes_per_worker", "many"},
                    BadCase{"host_memory_limit: -1", "host_memory_limit", "-1"},
                    BadCase{"allow_uids: [nobody]", "allow_uids", "nobody"},
                    BadCase{"log_level: loud", "loud", "debug"},
                    BadCase{"cluster: {node: 0}", "cluster.addresses", "2 to"},
                    BadCase{"cluster: {node: 2, addresses: [\"127.0.0.1:1\", \"127.0.0.1:2\"]}",
                            "cluster.node", "0 to 1"},
                    BadCase{"cluster: {addresses: [\"127.0.0.1:1\", \"127.0.0.1:1\"]}",
                            "cluster.addresses", "twice"},
                    BadCase{"cluster: {addresses: [\"localhost:1\", \"127.0.0.1:1\"]}",
                            "cluster.addresses", "localhost:1"},
                    BadCase{"cluster: {addresses: [\"127.0.0.1\", \"127.0.0.1:0\"]}",
                            "cluster.addresses", "127.0.0.1"},
                    BadCase{"cluster: {addresses: [\"127.0.0.1:70000\", \"127.0.0.1:1\"]}",
                            "cluster.addresses", "70000"},
                    BadCase{"cluster: {addresses: [\"10.0.0.1:1\", \"127.0.0.1:1\"]}",
                            "cluster.addresses", "allow_insecure"},
                    BadCase{"cluster: {addresses: [\"10.0.0.1:1\", \"10.0.0.2:1\"],"
                            " allow_insecure: true}\ngloo_address: 127.0.0.1",
                            "gloo_address", "10.0.0.1:1"},
                    BadCase{"cluster: {nodes: 2, addresses: [\"127.0.0.1:1\", \"127.0.0.1:2\"]}",
                            "nodes", "nodes"},
                    BadCase{"nvme_paths: /a", "nvme_paths", "list"},
                    BadCase{"nvme_paths: [a]", "nvme_paths[0].path", "\"a\""},
                    BadCase{"nvme_paths: [/a, [/b]]", "nvme_paths[1]", "a list"},
                    BadCase{"nvme_paths: [/a, /b/../a]", "nvme_paths[1].path", "/b/../a"},
                    BadCase{"nvme_paths: [/a, {path: /a/}]", "nvme_paths", "twice"},
                    BadCase{"nvme_paths: [{weight: 2}]", "nvme_paths[0].path", "missing"},
                    BadCase{"nvme_paths: [{path: /a, weight: 0}]", "nvme_paths[0].weight", "0"},
                    BadCase{"nvme_paths: [{path: /a, wieght: 2}]", "nvme_paths[0].wieght",
                            "unknown key"},
                    BadCase{"nvme_limit: lots", "nvme_limit", "lots"},
                    BadCase{"nvme_write_budget: -1", "nvme_write_budget", "-1"},
                    BadCase{"io_backend: aio", "io_backend", "uring"},
                    BadCase{"io_timeout: 0s", "io_timeout", "0"},
                    BadCase{"io_timeout: 48h", "io_timeout", "48h"},
                    BadCase{"io_bytes_per_second: fast", "io_bytes_per_second", "fast"},
                    BadCase{"io_depth: 4097", "io_depth", "4097"},
                    BadCase{"huge_pages: sometimes", "huge_pages", "sometimes"},
                    BadCase{"require_pinned: 1", "require_pinned", "1"},
                    BadCase{"job_host_limit: -5", "job_host_limit", "-5"},
                    BadCase{"job_nvme_limit: [1]", "job_nvme_limit", "list"},
                    BadCase{"metrics_adress: off", "metrics_adress", "metrics_adress"}));

TEST(DaemonConfig, ADirectoryIsNoConfigFile) {
  DaemonFlags flags;
  flags.config_file = "/tmp";
  const auto config = LoadDaemonConfig(flags);
  ASSERT_FALSE(config.ok());
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("/tmp is a directory"));
}

TEST(DaemonConfig, ARunDirTooLongForASocketIsRefusedWithBothLengths) {
  const auto config = Load("run_dir: /" + std::string(100, 'x') + "\n");
  ASSERT_FALSE(config.ok());
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("101 characters"));
}

}  // namespace
}  // namespace zeroshard
