// What nvcc made of the kernels: no spills, no local memory, 16-byte accesses, no fused or
// approximate arithmetic. Looks at the compiler's report and at the PTX, which the build leaves.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <string>

#include "worker/cuda/launch_plan.h"

namespace zeroshard {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_FALSE(text.str().empty()) << path;
  return text.str();
}

struct Report {
  int stack = -1;
  int spill_stores = -1;
  int spill_loads = -1;
  int registers = -1;
};

// By "kernel architecture".
std::map<std::string, Report> ReadReports(const std::string& path) {
  const std::regex entry("Compiling entry function '(\\w+)' for '(sm_\\w+)'");
  const std::regex memory(
      "(\\d+) bytes stack frame, (\\d+) bytes spill stores, (\\d+) bytes spill loads");
  const std::regex registers("Used (\\d+) registers");
  std::map<std::string, Report> reports;
  Report* current = nullptr;
  std::istringstream lines(ReadFile(path));
  std::smatch found;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_search(line, found, entry)) {
      current = &reports[found.str(1) + " " + found.str(2)];
    } else if (current != nullptr && std::regex_search(line, found, memory)) {
      *current = {std::stoi(found.str(1)), std::stoi(found.str(2)), std::stoi(found.str(3)), -1};
    } else if (current != nullptr && std::regex_search(line, found, registers)) {
      current->registers = std::stoi(found.str(1));
    }
  }
  return reports;
}

// The text of each kernel in a PTX file.
std::map<std::string, std::string> ReadKernels(const std::string& path) {
  const std::string text = ReadFile(path);
  const std::string mark = ".visible .entry ";
  std::map<std::string, std::string> kernels;
  for (size_t at = text.find(mark); at != std::string::npos;) {
    const size_t name = at + mark.size();
    const size_t next = text.find(mark, name);
    kernels[text.substr(name, text.find('(', name) - name)] = text.substr(at, next - at);
    at = next;
  }
  return kernels;
}

int Count(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return static_cast<int>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator()));
}

constexpr const char* kReport = "worker/cuda/kernel_report.txt";
constexpr const char* kPtx = "worker/cuda/kernels.ptx";

TEST(KernelCodeTest, NothingSpillsOnAnyDevice) {
  const std::map<std::string, Report> reports = ReadReports(kReport);
  for (const char* name : gpu::KernelNames()) {
    for (const char* architecture : {"sm_80", "sm_90", "sm_100"}) {
      const std::string key = std::string(name) + " " + architecture;
      const auto report = reports.find(key);
      ASSERT_NE(report, reports.end()) << key;
      EXPECT_EQ(report->second.stack, 0) << key;
      EXPECT_EQ(report->second.spill_stores, 0) << key;
      EXPECT_EQ(report->second.spill_loads, 0) << key;
      // Of 65,536 registers 128 are for each of 512 threads, enough for loads in flight.
      EXPECT_GT(report->second.registers, 0) << key;
      EXPECT_LE(report->second.registers, 128) << key;
    }
  }
}

TEST(KernelCodeTest, NoLocalMemoryAndNoFusedArithmetic) {
  for (const auto& [name, text] : ReadKernels(kPtx)) {
    EXPECT_EQ(Count(text, "\\.local|__local_depot"), 0) << name;
    EXPECT_EQ(Count(text, "\\bfma\\.|\\bmad\\.rn|\\.approx|\\.ftz|div\\.full"), 0) << name;
    EXPECT_EQ(Count(text, "\\b(ld|st)\\.(volatile\\.)?(v2\\.|v4\\.)?[bufs]\\d"), 0)
        << name << ": an access that is not known to be of device memory";
  }
}

// Master before and after, each fp32 state before and after: as many of 16 bytes, and no fp32
// array in smaller pieces.
TEST(KernelCodeTest, UpdatesMove16BytesAnAccess) {
  const std::map<std::string, std::string> kernels = ReadKernels(kPtx);
  const std::map<std::string, int> states = {{"AdamW", 2},       {"Adam", 2},    {"Sgd", 0},
                                             {"SgdMomentum", 1}, {"Adagrad", 1}, {"Lion", 1}};
  for (const auto& [optimizer, count] : states) {
    const std::string name = "zs_update_" + optimizer + "_fp32";
    ASSERT_EQ(kernels.count(name), 1u) << name;
    const std::string& text = kernels.at(name);
    // The gradient may be fp32, too, and so may the parameter.
    EXPECT_GE(Count(text, "ld\\.global(\\.nc)?\\.v4"), 2 + count) << name;
    EXPECT_GE(Count(text, "st\\.global\\.v4"), 2 + count) << name;
    EXPECT_EQ(Count(text, "(ld|st)\\.global(\\.nc)?\\.[bufs]\\d"), 0) << name << ", scalar";
  }
  // Without a master, every array is of 16-bit elements: gradient, master, states; and the
  // parameter.
  for (const auto& [optimizer, count] : states) {
    const std::string& text = kernels.at("zs_update_" + optimizer + "_none_bf16");
    EXPECT_GE(Count(text, "ld\\.global(\\.nc)?\\.v4"), 2 + count) << optimizer;
    EXPECT_GE(Count(text, "st\\.global\\.v4"), 2 + count) << optimizer;
    for (const char* format : {"_none_bf16", "_none_fp32"}) {
      EXPECT_EQ(Count(kernels.at("zs_update_" + optimizer + format),
                      "(ld|st)\\.global(\\.nc)?\\.(v2|[bufs]\\d)"),
                0)
          << optimizer << format << ", an access of fewer bytes";
    }
  }
  EXPECT_GE(Count(kernels.at("zs_sum_bf16"), "ld\\.global(\\.nc)?\\.v4"), 1);
  EXPECT_GE(Count(kernels.at("zs_squares"), "ld\\.global(\\.nc)?\\.v4"), 1);
}

}  // namespace
}  // namespace zeroshard
