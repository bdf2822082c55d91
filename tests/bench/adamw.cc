// B1: AdamW, bf16 in and out, crash protection on, against the memory traffic of the same shape.
//
//   fp32 master    grad 2 r, master 4 rw, states 8 rw, parameter 2 w: 28 bytes an element
//   split master   grad 2 r, both halves 4 rw, states 8 rw:           26 bytes an element
//
// 256 Mi parameters, two threads, memory files of 4 KiB pages. Before anything is timed, sampled
// elements of an update are compared with the formula in fp64.
//
// With --serve nothing is compared: `run N` on stdin runs N updates and prints the seconds they
// took, `check` prints ok or what is wrong; so another program can time the same update between its
// own. Options: --threads=N, and of --serve: --elements=N, --split, --huge (private memory of huge
// pages).
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "absl/time/clock.h"
#include "tests/bench/adamw_job.h"
#include "tests/bench/paired.h"

namespace zeroshard::bench {
namespace {

struct Options {
  bool serve = false;
  bool split = false;
  Pages pages = Pages::kMemoryFiles;
  bool smoke = false;
  int threads = 2;
  uint64_t elements = uint64_t{256} << 20;
};

Options Parse(int argc, char** argv) {
  Options options;
  bool given = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--serve") options.serve = true;
    if (argument == "--split") options.split = true;
    if (argument == "--huge") options.pages = Pages::kHuge;
    if (argument == "--smoke") options.smoke = true;
    if (argument.rfind("--threads=", 0) == 0) options.threads = std::stoi(argument.substr(10));
    if (argument.rfind("--elements=", 0) == 0) {
      options.elements = std::stoull(argument.substr(11));
      given = true;
    }
  }
  if (options.smoke && !given) options.elements = uint64_t{1} << 20;
  return options;
}

template <typename Work>
double Seconds(const Work& work) {
  const absl::Time start = absl::Now();
  work();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

int Serve(const Options& options) {
  AdamWJob job(options.split ? MasterKind::kSplit : MasterKind::kFloat32, options.elements,
               options.threads, options.pages);
  std::cout << "ready " << job.elements() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    int count = 0;
    words >> verb >> count;
    if (verb == "check") {
      const std::string wrong = job.Check();
      std::cout << (wrong.empty() ? "ok" : wrong) << std::endl;
    } else if (verb == "run" && count > 0) {
      std::cout << Seconds([&] {
        for (int i = 0; i < count; ++i) job.Update();
      }) << std::endl;
    } else {
      std::cout << "expected: run N | check" << std::endl;
    }
  }
  return 0;
}

void CompareWithStream(Bench& bench, const Options& options, MasterKind master,
                       const std::string& name) {
  AdamWJob job(master, options.elements, options.threads);
  for (int step = 0; step < 3; ++step) {
    const std::string wrong = job.Check();
    bench.Require(wrong.empty(), name + ": " + wrong);
  }
  const double bytes = static_cast<double>(job.elements()) * job.bytes_per_element() / 1e9;
  bench.Compare(
      {{name, "shape-matched stream", "GB/s", AtLeast(0.92)}},
      [&] { return std::vector<double>{bytes / Seconds([&] { job.Update(); })}; },
      [&] { return std::vector<double>{bytes / Seconds([&] { job.Stream(); })}; });
  const std::string wrong = job.Check();
  bench.Require(wrong.empty(), name + ": " + wrong);
}

int Main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  if (options.serve) return Serve(options);
  Bench bench("adamw", argc, argv);
  CompareWithStream(bench, options, MasterKind::kFloat32, "AdamW, fp32 master, protected");
  CompareWithStream(bench, options, MasterKind::kSplit, "AdamW, split master, protected");
  return bench.Finish();
}

}  // namespace
}  // namespace zeroshard::bench

int main(int argc, char** argv) { return zeroshard::bench::Main(argc, argv); }
