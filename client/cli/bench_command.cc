#include "client/cli/bench_command.h"

#include <iostream>
#include <memory>
#include <string>

#include "client/cli/nvme_bench.h"

namespace zeroshard {
namespace {

struct BenchFlags {
  NvmeBenchOptions options;
  std::string backend = "auto";
  uint64_t size_mib = 1024;
  int seconds = 10;
  bool json = false;
};

int BenchNvme(const BenchFlags& flags) {
  NvmeBenchOptions options = flags.options;
  options.backend = ParseIoBackend(flags.backend).value();
  options.file_bytes = flags.size_mib << 20;
  options.time = absl::Seconds(flags.seconds);
  const absl::StatusOr<NvmeBenchReport> report = RunNvmeBench(options);
  if (!report.ok()) {
    std::cerr << "zeroshard: " << report.status().message() << "\n";
    return 1;
  }
  std::cout << (flags.json ? NvmeBenchJson(*report) : NvmeBenchText(*report));
  return 0;
}

}  // namespace

void AddBenchCommand(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* bench = app.add_subcommand("bench", "Measures this machine; asks no daemon");
  bench->require_subcommand(1);
  CLI::App* nvme = bench->add_subcommand(
      "nvme", "What a drive does for the nvme tier, and the aio settings to use");
  auto flags = std::make_shared<BenchFlags>();
  nvme->add_option("path", flags->options.path, "A directory on the drive")->required();
  nvme->add_option("--size", flags->size_mib, "MiB of the file, at most (default: 1024)")
      ->check(CLI::Range(32, 1 << 20));
  nvme->add_option("--seconds", flags->seconds, "Time in all, about (default: 10)")
      ->check(CLI::Range(1, 3600));
  nvme->add_option("--backend", flags->backend, "auto, uring or threads")
      ->check(CLI::IsMember({"auto", "uring", "threads"}));
  nvme->add_flag("--allow-network-path", flags->options.allow_network_path,
                 "Also on a network file system");
  nvme->add_flag("--json", flags->json, "Print JSON");
  nvme->callback([flags, &chosen] { chosen = [flags] { return BenchNvme(*flags); }; });
}

}  // namespace zeroshard
