// fio as the limit of benchmarks of the NVMe tier: the same transfers on the same layout.
#ifndef ZEROSHARD_TESTS_BENCH_FIO_H_
#define ZEROSHARD_TESTS_BENCH_FIO_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace zeroshard::bench {

// `count` blocks at every other place from `offset` on: read, or with `mixed` as many read as
// written, in an order of fio's choice.
struct FioStream {
  bool mixed = false;
  uint64_t offset = 0;
  uint64_t block = 0;
  uint64_t count = 0;
  uint32_t depth = 0;
};

struct FioResult {
  double gb_per_second = 0;
  double cpu_seconds_gib = 0;  // of fio's thread, for each GiB moved
};

class Fio {
 public:
  // NotFound, with what to install, when there is none.
  static absl::StatusOr<Fio> Find();

  const std::string& version() const { return version_; }  // "fio-3.33"
  // Runs the stream by io_uring with registered buffers in huge pages (with small ones fio may be
  // only half as fast), with O_DIRECT, on a file that exists.
  absl::StatusOr<FioResult> Run(const std::string& file, const FioStream& stream) const;

 private:
  explicit Fio(std::string version) : version_(std::move(version)) {}
  std::string version_;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_FIO_H_
