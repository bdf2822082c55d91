#include "tests/bench/fio.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace zeroshard::bench {
namespace {

// Standard output of a command of the shell that ends well.
absl::StatusOr<std::string> OutputOf(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "re");
  if (pipe == nullptr) return ErrnoError(errno, "popen", command);
  std::string output;
  char piece[4096];
  for (size_t got; (got = std::fread(piece, 1, sizeof(piece), pipe)) > 0;) {
    output.append(piece, got);
  }
  if (const int status = ::pclose(pipe); status != 0) {
    return absl::UnknownError(absl::StrCat("\"", command, "\" ended with status ", status));
  }
  return output;
}

std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

}  // namespace

absl::StatusOr<Fio> Fio::Find() {
  absl::StatusOr<std::string> version = OutputOf("fio --version 2>/dev/null");
  if (!version.ok() || version->rfind("fio-", 0) != 0) {
    return absl::NotFoundError("no fio: install Debian's package fio (apt-get install fio)");
  }
  while (!version->empty() && version->back() == '\n') version->pop_back();
  return Fio(*std::move(version));
}

absl::StatusOr<FioResult> Fio::Run(const std::string& file, const FioStream& stream) const {
  const uint64_t wanted = stream.block * stream.count * (stream.mixed ? 2 : 1);
  const std::string command = absl::StrCat(
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --output-format=json --thread --ioengine=io_uring "
      "--direct=1 --fixedbufs=1",
      " --registerfiles=1 --mem_align=2M --invalidate=0 --name=zeroshard --rw=",
      stream.mixed ? "rw:" : "read:", stream.block, " --rwmixread=50 --bs=", stream.block,
      " --offset=", stream.offset, " --size=", 2 * stream.block * stream.count,
      " --io_size=", wanted, " --iodepth=", stream.depth,
      // A colon separates file names.
      " --filename=", Quoted(absl::StrReplaceAll(file, {{":", "\\:"}})));
  ZS_ASSIGN_OR_RETURN(const std::string output, OutputOf(command));
  const auto report = nlohmann::json::parse(
      output.substr(std::min(output.find('{'), output.size())), nullptr, false);
  if (!report.is_object() || report["jobs"].size() != 1) {
    return absl::UnknownError(absl::StrCat("fio printed no report: ", output.substr(0, 200)));
  }
  const auto& job = report["jobs"][0];
  double bytes = 0, seconds = 0;
  for (const char* direction : {"read", "write"}) {
    bytes += job[direction]["io_bytes"].get<double>();
    seconds = std::max(seconds, job[direction]["runtime"].get<double>() / 1e3);
  }
  if (bytes != static_cast<double>(wanted) || seconds <= 0) {
    return absl::UnknownError(absl::StrCat("fio moved ", bytes, " bytes of ", wanted));
  }
  const double cpu = (job["usr_cpu"].get<double>() + job["sys_cpu"].get<double>()) / 100 *
                     job["job_runtime"].get<double>() / 1e3;
  return FioResult{bytes / seconds / 1e9, cpu / (bytes / (1 << 30))};
}

}  // namespace zeroshard::bench
