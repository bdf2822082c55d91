#include "tests/storage/checkpoint_fixture.h"

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "storage/layout_proto.h"
#include "storage/shard_writer.h"

namespace zeroshard {
TestJob TestJob::OfLengths(const std::vector<uint64_t>& lengths) {
  std::vector<ParameterSpec> parameters;
  for (uint64_t length : lengths) {
    ParameterSpec spec;
    spec.name = absl::StrCat("p", parameters.size());
    spec.shape = {length};
    spec.module = "m";
    parameters.push_back(std::move(spec));
  }
  return TestJob(std::move(parameters));
}

TestJob::TestJob(std::vector<ParameterSpec> parameters) : parameters_(std::move(parameters)) {}

Layout TestJob::LayoutFor(uint32_t workers) const {
  absl::StatusOr<Layout> layout = Layout::Create(parameters_, workers);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

CheckpointIdentity TestJob::Identity() const { return {job_id, LayoutFor(1).fingerprint(), step}; }

records::v1::CheckpointManifest TestJob::Manifest() const {
  records::v1::CheckpointManifest manifest;
  manifest.set_job("test");
  manifest.set_job_id(job_id);
  manifest.set_layout_fingerprint(LayoutFor(1).fingerprint());
  *manifest.mutable_manifest() = ParametersToProto(parameters_);
  manifest.mutable_manifest()->add_groups();
  manifest.set_exclude_frozen(exclude_frozen);
  manifest.mutable_state()->set_step(step);
  manifest.mutable_state()->add_user_states(std::string("bytes\0of rank 0", 15));
  return manifest;
}

std::vector<TestKind> TestJob::Kinds(const Unit& unit) const {
  std::vector<TestKind> kinds;
  if (unit.trainable || !exclude_frozen) kinds.push_back({"parameter", unit.dtype});
  if (unit.trainable) {
    for (const char* kind : {"master", "exp_avg", "exp_avg_sq"}) kinds.push_back({kind});
  }
  return kinds;
}

std::vector<std::byte> TestJob::Bytes(uint32_t unit, const TestKind& kind,
                                      GrainRange grains) const {
  const uint64_t seed = std::hash<std::string>()(kind.name) ^ job_id ^ (step << 20) ^ unit;
  const uint64_t grain_bytes = kGrainElements * SizeOf(kind.dtype);
  std::vector<std::byte> bytes(grains.size() * grain_bytes);
  for (uint64_t i = 0; i < bytes.size(); ++i) {
    const uint64_t place = grains.begin * grain_bytes + i;
    bytes[i] = static_cast<std::byte>((seed + place) * 0x9E3779B97F4A7C15u >> 56);
  }
  return bytes;
}

absl::Status TestJob::WriteShard(int dir_fd, uint32_t worker, uint32_t workers) const {
  const Layout layout = LayoutFor(workers);
  ZS_ASSIGN_OR_RETURN(ShardWriter writer, ShardWriter::Create(dir_fd, worker, Identity(), 4096));
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const GrainRange slice = layout.slice(u, worker);
    for (const TestKind& kind : Kinds(layout.units()[u])) {
      ZS_RETURN_IF_ERROR(writer.Append(u, slice, kind.name, kind.dtype, Bytes(u, kind, slice)));
    }
  }
  return std::move(writer).Finish().status();
}

absl::StatusOr<uint64_t> TestJob::Save(int root_fd, const std::string& name,
                                       uint32_t workers) const {
  ZS_ASSIGN_OR_RETURN(CheckpointWriter checkpoint, CheckpointWriter::Create(root_fd, name));
  for (uint32_t worker = 0; worker < workers; ++worker) {
    ZS_RETURN_IF_ERROR(WriteShard(checkpoint.dir_fd(), worker, workers));
  }
  return std::move(checkpoint).Commit(Manifest(), workers);
}

absl::Status TestJob::Compare(CheckpointReader& reader, uint32_t workers) const {
  const Layout layout = LayoutFor(workers);
  if (layout.fingerprint() != reader.layout().fingerprint()) {
    return absl::InvalidArgumentError("another layout");
  }
  for (uint32_t worker = 0; worker < workers; ++worker) {
    for (uint32_t u = 0; u < layout.units().size(); ++u) {
      const GrainRange slice = layout.slice(u, worker);
      for (const TestKind& kind : Kinds(layout.units()[u])) {
        const std::vector<std::byte> expected = Bytes(u, kind, slice);
        std::vector<std::byte> got(expected.size());
        ZS_RETURN_IF_ERROR(reader.Read(u, slice, kind.name, kind.dtype, got));
        if (got != expected) {
          return absl::InternalError(absl::StrCat(kind.name, " of unit ", u, " differs"));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
