#include "tests/worker/state_checkpoints.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "storage/checkpoint.h"
#include "worker/shard_files.h"

namespace zeroshard {
namespace {

internal::v1::ShardDone Command(LocalJob& job, uint32_t worker,
                                const internal::v1::ToWorker& command, int dir_fd) {
  std::vector<UniqueFd> fds;
  fds.emplace_back(dup(dir_fd));
  return RunShardCommand(job.engine(worker), command, fds);
}

}  // namespace

void SaveState(LocalJob& job, uint32_t workers, const TempDir& dir, const std::string& name) {
  auto writer = CheckpointWriter::Create(dir.fd(), name);
  ASSERT_TRUE(writer.ok()) << writer.status();
  internal::v1::ToWorker command;
  command.mutable_save();
  records::v1::CheckpointManifest manifest;
  for (uint32_t w = 0; w < workers; ++w) {
    const auto done = Command(job, w, command, writer->dir_fd());
    ASSERT_EQ(done.code(), 0u) << done.message();
    if (w > 0) continue;
    ASSERT_TRUE(manifest.mutable_state()->ParseFromString(done.job_state()));
  }
  manifest.set_job_id(job.memory(0).start().job_id());
  manifest.set_layout_fingerprint(job.layout().fingerprint());
  *manifest.mutable_manifest() = job.memory(0).start().manifest();
  const auto bytes = (*std::move(writer)).Commit(std::move(manifest), workers);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
}

std::string RestoreState(LocalJob& job, uint32_t workers, const TempDir& dir,
                         const std::string& name, bool parameters_only) {
  const UniqueFd checkpoint = *OpenDirectory(dir.Path(name));
  auto reader = CheckpointReader::Open(checkpoint.get());
  if (!reader.ok()) return std::string(reader.status().message());
  internal::v1::ToWorker command;
  command.mutable_restore()->set_parameters_only(parameters_only);
  command.mutable_restore()->set_job_state(reader->manifest().state().SerializeAsString());
  for (uint32_t w = 0; w < workers; ++w) {
    const auto done = Command(job, w, command, checkpoint.get());
    if (done.code() != 0) return done.message();
  }
  return "";
}

}  // namespace zeroshard
