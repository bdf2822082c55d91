#include "storage/checkpoint.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/shard_writer.h"
#include "tests/storage/checkpoint_fixture.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

CheckpointReader Reader(const TempDir& dir, const std::string& name) {
  absl::StatusOr<CheckpointReader> reader = CheckpointReader::OpenByName(dir.fd(), name);
  EXPECT_TRUE(reader.ok()) << reader.status();
  return *std::move(reader);
}

// Small parameters, and units large enough that slices and records of 4096 grains cross.
std::vector<ParameterSpec> MixedModel() {
  std::vector<ParameterSpec> parameters;
  const auto add = [&](const char* name, std::vector<uint64_t> shape, DType dtype, bool trainable) {
    ParameterSpec spec;
    spec.name = name;
    spec.shape = std::move(shape);
    spec.dtype = dtype;
    spec.trainable = trainable;
    spec.module = std::string(name, 1);
    parameters.push_back(std::move(spec));
  };
  add("a.weight", {3, 700, 1000}, DType::kBfloat16, true);
  add("a.bias", {}, DType::kBfloat16, true);
  add("b.scale", {7}, DType::kFloat32, true);
  add("b.none", {0, 4}, DType::kFloat32, true);
  add("c.base", {40, 1000}, DType::kFloat16, false);
  return parameters;
}

TEST(CheckpointTest, WrittenByAnyNumberOfWorkersReadByAnyOther) {
  const TestJob small = TestJob::OfLengths({5, 7, 0, 1});
  const TestJob mixed(MixedModel());
  for (const TestJob* job : {&small, &mixed}) {
    for (uint32_t writers : {1, 2, 3, 5}) {
      TempDir dir;
      const auto bytes = job->Save(dir.fd(), "step-7", writers);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      CheckpointReader reader = Reader(dir, "step-7");
      EXPECT_EQ(dir.Count(), 1u);
      for (uint32_t readers : {1, 2, 3, 4, 7}) {
        EXPECT_EQ(job->Compare(reader, readers), absl::OkStatus()) << writers << readers;
      }
      EXPECT_EQ(reader.Verify(), absl::OkStatus());
    }
  }
}

TEST(CheckpointTest, TheManifestComesBack) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({5, 7});
  const auto bytes = job.Save(dir.fd(), "c", 2);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const CheckpointReader reader = Reader(dir, "c");
  EXPECT_EQ(reader.manifest().state().step(), 7u);
  EXPECT_EQ(reader.manifest().state().user_states(0), std::string("bytes\0of rank 0", 15));
  ASSERT_EQ(reader.manifest().shards_size(), 2);
  uint64_t on_disk = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir.Path("c"))) {
    on_disk += entry.file_size();
  }
  EXPECT_EQ(*bytes, on_disk);
  EXPECT_THAT(reader.kinds(), ElementsAre("exp_avg", "exp_avg_sq", "master", "parameter"));
}

TEST(CheckpointTest, FrozenParametersAreInOrOut) {
  for (bool exclude : {false, true}) {
    TempDir dir;
    TestJob job(MixedModel());
    job.exclude_frozen = exclude;
    const auto bytes = job.Save(dir.fd(), "c", 2);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    CheckpointReader reader = Reader(dir, "c");
    const uint32_t frozen = reader.layout().place(4).unit;
    EXPECT_EQ(reader.Has(frozen, "parameter"), !exclude);
    EXPECT_FALSE(reader.Has(frozen, "master"));
    EXPECT_EQ(job.Compare(reader, 3), absl::OkStatus());
    std::vector<std::byte> out(kGrainElements * 2);
    const absl::Status read = reader.Read(frozen, {0, 1}, "parameter", DType::kFloat16, out);
    EXPECT_EQ(read.code(), exclude ? absl::StatusCode::kNotFound : absl::StatusCode::kOk);
  }
}

TEST(CheckpointTest, PartsOfRecordsInAnyOrder) {
  TempDir dir;
  const TestJob job(MixedModel());
  ASSERT_TRUE(job.Save(dir.fd(), "c", 2).ok());
  CheckpointReader reader = Reader(dir, "c");
  const uint64_t grains = reader.layout().units()[0].grains;
  for (uint64_t at : {uint64_t{0}, grains - 1, uint64_t{4095}, uint64_t{4096}, grains / 2}) {
    const GrainRange range = {at, std::min(at + 3, grains)};
    std::vector<std::byte> out(range.elements() * 4);
    ASSERT_TRUE(reader.Read(0, range, "exp_avg", DType::kFloat32, out).ok());
    EXPECT_EQ(out, job.Bytes(0, {"exp_avg"}, range));
  }
}

TEST(CheckpointTest, RefusesWhatDoesNotFit) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({300});
  ASSERT_TRUE(job.Save(dir.fd(), "c", 1).ok());
  CheckpointReader reader = Reader(dir, "c");
  std::vector<std::byte> out(2 * kGrainElements * 4);
  const std::span<std::byte> half = std::span(out).first(kGrainElements * 4);
  using enum absl::StatusCode;
  EXPECT_EQ(reader.Read(0, {0, 3}, "parameter", DType::kFloat32, out).code(), kInvalidArgument);
  EXPECT_EQ(reader.Read(0, {0, 1}, "parameter", DType::kFloat32, out).code(), kInvalidArgument);
  EXPECT_EQ(reader.Read(1, {0, 2}, "parameter", DType::kFloat32, out).code(), kInvalidArgument);
  EXPECT_EQ(reader.Read(0, {0, 2}, "momentum_buffer", DType::kFloat32, out).code(), kNotFound);
  const absl::Status type = reader.Read(0, {0, 2}, "parameter", DType::kBfloat16, half);
  EXPECT_THAT(std::string(type.message()), HasSubstr("was saved as float32"));
  EXPECT_TRUE(reader.Read(0, {1, 1}, "parameter", DType::kFloat32, {}).ok());
}

TEST(CheckpointTest, NamesAreCheckedAndTaken) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({5});
  ASSERT_TRUE(job.Save(dir.fd(), "c", 1).ok());
  EXPECT_EQ(job.Save(dir.fd(), "c", 1).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(job.Save(dir.fd(), "../c", 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckpointReader::OpenByName(dir.fd(), "../c").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckpointReader::OpenByName(dir.fd(), "d").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(dir.Count(), 1u);
}

TEST(CheckpointTest, AnIncompleteCheckpointIsNotCommitted) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({600, 700});
  {
    auto checkpoint = CheckpointWriter::Create(dir.fd(), "c");
    ASSERT_TRUE(checkpoint.ok());
    ASSERT_TRUE(job.WriteShard(checkpoint->dir_fd(), 0, 2).ok());
    const auto bytes = (*std::move(checkpoint)).Commit(job.Manifest(), 2);
    EXPECT_THAT(std::string(bytes.status().message()), HasSubstr("shard-1.zsc at offset 0"));
  }
  EXPECT_EQ(dir.Count(), 0u);
  auto checkpoint = CheckpointWriter::Create(dir.fd(), "c");
  ASSERT_TRUE(job.WriteShard(checkpoint->dir_fd(), 0, 2).ok());
  const auto bytes = (*std::move(checkpoint)).Commit(job.Manifest(), 1);
  EXPECT_THAT(std::string(bytes.status().message()), HasSubstr("no shard holds grain"));
  EXPECT_EQ(dir.Count(), 0u);
}

TEST(CheckpointTest, AGrainIsStoredOnce) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({600});
  auto checkpoint = CheckpointWriter::Create(dir.fd(), "c");
  ASSERT_TRUE(job.WriteShard(checkpoint->dir_fd(), 0, 1).ok());
  auto second = ShardWriter::Create(checkpoint->dir_fd(), 1, job.Identity(), 0);
  ASSERT_TRUE(second.ok());
  const GrainRange range = {1, 2};
  ASSERT_TRUE(
      second->Append(0, range, "master", DType::kFloat32, job.Bytes(0, {"master"}, range)).ok());
  ASSERT_TRUE((*std::move(second)).Finish().ok());
  const auto bytes = (*std::move(checkpoint)).Commit(job.Manifest(), 2);
  EXPECT_THAT(std::string(bytes.status().message()), HasSubstr("stored twice"));
}

TEST(CheckpointTest, TheWriterRefusesWrongSizesAndKinds) {
  TempDir dir;
  auto writer = ShardWriter::Create(dir.fd(), 0, {}, 0);
  ASSERT_TRUE(writer.ok());
  const std::vector<std::byte> grain(kGrainElements * 4);
  using enum absl::StatusCode;
  EXPECT_EQ(writer->Append(0, {0, 2}, "master", DType::kFloat32, grain).code(), kInvalidArgument);
  EXPECT_EQ(writer->Append(0, {2, 1}, "master", DType::kFloat32, grain).code(), kInvalidArgument);
  EXPECT_EQ(writer->Append(0, {0, 1}, "Master", DType::kFloat32, grain).code(), kInvalidArgument);
  EXPECT_EQ(writer->Append(0, {0, 1}, "", DType::kFloat32, grain).code(), kInvalidArgument);
  EXPECT_TRUE(writer->Append(0, {0, 1}, "master", DType::kFloat32, grain).ok());
  EXPECT_EQ(ShardWriter::Create(dir.fd(), 0, {}, 0).status().code(), kAlreadyExists);
}

}  // namespace
}  // namespace zeroshard
