// A job's states whose every byte is known, saved with one number of workers and compared with what
// another number of workers reads.
#ifndef ZEROSHARD_TESTS_STORAGE_CHECKPOINT_FIXTURE_H_
#define ZEROSHARD_TESTS_STORAGE_CHECKPOINT_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "proto/records.pb.h"
#include "storage/checkpoint.h"
#include "storage/layout.h"

namespace zeroshard {

struct TestKind {
  std::string name;
  DType dtype = DType::kFloat32;
};

class TestJob {
 public:
  explicit TestJob(std::vector<ParameterSpec> parameters);
  // One module of vectors of these lengths; trainable and fp32.
  static TestJob OfLengths(const std::vector<uint64_t>& lengths);

  uint64_t job_id = 0x1122334455667788;
  uint64_t step = 7;
  bool exclude_frozen = false;

  Layout LayoutFor(uint32_t workers) const;
  CheckpointIdentity Identity() const;
  records::v1::CheckpointManifest Manifest() const;

  // Kinds of state of a unit: parameter, and for trainable ones master and AdamW's.
  std::vector<TestKind> Kinds(const Unit& unit) const;
  // The bytes of grains of a state: a function of job, step, unit, kind and place.
  std::vector<std::byte> Bytes(uint32_t unit, const TestKind& kind, GrainRange grains) const;

  // One worker's shard.
  absl::Status WriteShard(int dir_fd, uint32_t worker, uint32_t workers) const;
  // The whole checkpoint.
  absl::StatusOr<uint64_t> Save(int root_fd, const std::string& name, uint32_t workers) const;
  // Reads the slices of every one of `workers` workers and compares them byte for byte.
  absl::Status Compare(CheckpointReader& reader, uint32_t workers) const;

 private:
  std::vector<ParameterSpec> parameters_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_CHECKPOINT_FIXTURE_H_
