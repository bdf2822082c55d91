// Checkpoints: the directory as a whole. The daemon makes and commits one (CheckpointWriter),
// workers fill it with their shards (storage/shard_writer.h), any number of workers reads it
// (CheckpointReader).
//
// A checkpoint is there whole or not at all, and nothing in it is used before it was verified.
// Format page: docs/checkpoint.md.
#ifndef ZEROSHARD_STORAGE_CHECKPOINT_H_
#define ZEROSHARD_STORAGE_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "proto/records.pb.h"
#include "storage/layout.h"
#include "storage/named_dir.h"
#include "storage/record_map.h"
#include "storage/shard_reader.h"

namespace zeroshard {

// Owned by the daemon during a save; one thread at a time. Destroyed before Commit, it removes the
// directory with all that workers wrote into it.
class CheckpointWriter {
 public:
  // `root_fd`: the checkpoint directory. InvalidArgument for a name that is not one, AlreadyExists
  // when it is taken.
  static absl::StatusOr<CheckpointWriter> Create(int root_fd, const std::string& name);

  // The directory that workers write their shards into; valid until Commit.
  int dir_fd() const { return directory_.fd(); }

  // Checks that shards of workers [0, workers) are whole and of this job, layout and step, and that
  // every grain of every parameter is there; adds the list of shards to `manifest`, writes it and
  // the marker, and gives the directory its name. Returns the bytes of all files. After an error
  // nothing of it is left, unless it was the last sync that failed. `manifest` must hold job_id,
  // layout_fingerprint, the parameters and state.step.
  absl::StatusOr<uint64_t> Commit(records::v1::CheckpointManifest manifest, uint32_t workers) &&;

 private:
  explicit CheckpointWriter(TemporaryDirectory directory) : directory_(std::move(directory)) {}

  TemporaryDirectory directory_;
};

// One thread at a time (Read keeps the last record it read in part).
class CheckpointReader {
 public:
  // `dir_fd`: the directory of one checkpoint; see OpenByName. Verifies marker, manifest and the
  // indices of all shards. DataLoss naming file and offset; FailedPrecondition without a COMMIT
  // marker.
  static absl::StatusOr<CheckpointReader> Open(int dir_fd);
  // Opens `name` beneath the checkpoint directory. NotFound when there is none.
  static absl::StatusOr<CheckpointReader> OpenByName(int root_fd, const std::string& name);

  const records::v1::CheckpointManifest& manifest() const { return manifest_; }
  // The layout of the job that wrote it, for one worker. A job may load the checkpoint when the
  // fingerprint of its own layout is the same.
  const Layout& layout() const { return layout_; }
  uint64_t bytes() const { return bytes_; }
  // Kinds of state that are there, sorted.
  std::vector<std::string> kinds() const { return map_.Kinds(); }
  bool Has(uint32_t unit, std::string_view kind) const { return !map_.Find(unit, kind).empty(); }
  // What is there of a kind that Has.
  RecordType TypeOf(uint32_t unit, std::string_view kind) const {
    return map_.Find(unit, kind).front().record.type;
  }

  // Reads the elements of `grains`, from whichever shards hold them. NotFound when the checkpoint
  // holds nothing of the kind for this unit; InvalidArgument when `out` has another size, or the
  // state another data type, than asked for. On error `out` holds garbage.
  absl::Status Read(uint32_t unit, GrainRange grains, std::string_view kind, RecordType type,
                    std::span<std::byte> out);

  // Reads and verifies all that is there.
  absl::Status Verify();

 private:
  explicit CheckpointReader(Layout layout) : layout_(std::move(layout)) {}

  absl::Status OpenShards(int dir_fd);
  absl::Status ReadPart(const RecordPlace& place, GrainRange part, std::span<std::byte> out);

  // Constant after Open.
  records::v1::CheckpointManifest manifest_;
  Layout layout_;
  std::vector<ShardReader> shards_;
  RecordMap map_;
  uint64_t bytes_ = 0;

  // The record that was last read in part, verified; at most 4 MiB.
  const RecordPlace* held_ = nullptr;
  std::vector<std::byte> held_bytes_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_CHECKPOINT_H_
