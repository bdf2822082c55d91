#include "storage/checkpoint.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/file_io.h"
#include "storage/layout_proto.h"
#include "storage/shard_format.h"

namespace zeroshard {
namespace {

using records::v1::CheckpointManifest;

constexpr char kManifestName[] = "manifest.pb";
constexpr char kCommitName[] = "COMMIT";
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;

CheckpointIdentity IdentityOf(const CheckpointManifest& manifest) {
  return {manifest.job_id(), manifest.layout_fingerprint(), manifest.state().step()};
}

// Writes and syncs a small file that must not exist.
absl::Status WriteFile(int dir_fd, const std::string& name, std::string_view bytes) {
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, OpenBeneath(dir_fd, name, O_WRONLY | O_CREAT | O_EXCL));
  const std::string path = DescribeFd(fd.get());
  ZS_RETURN_IF_ERROR(WriteAllAt(fd.get(), AsBytes(bytes), 0, path));
  ZS_RETURN_IF_ERROR(SyncFile(fd.get(), path));
  return std::move(fd).Close();
}

struct SmallFile {
  std::string path;
  std::string bytes;
};

absl::StatusOr<SmallFile> ReadFile(int dir_fd, const std::string& name, uint64_t max_bytes) {
  ZS_ASSIGN_OR_RETURN(const UniqueFd fd, OpenBeneath(dir_fd, name, O_RDONLY));
  SmallFile file;
  file.path = DescribeFd(fd.get());
  ZS_ASSIGN_OR_RETURN(const uint64_t bytes, RegularFileSize(fd.get(), file.path));
  if (bytes > max_bytes) {
    return CorruptAt(file.path, max_bytes, absl::StrCat("the file has ", bytes, " bytes"));
  }
  file.bytes.resize(bytes);
  ZS_RETURN_IF_ERROR(
      ReadAllAt(fd.get(), std::as_writable_bytes(std::span<char>(file.bytes)), 0, file.path));
  return file;
}

absl::StatusOr<Layout> LayoutOf(const CheckpointManifest& manifest) {
  ZS_ASSIGN_OR_RETURN(Layout layout, LayoutFromProto(manifest.manifest(), 1));
  if (layout.fingerprint() != manifest.layout_fingerprint()) {
    return absl::InvalidArgumentError(
        "the layout of the manifest's parameters is not the one that it names");
  }
  return layout;
}

absl::StatusOr<CheckpointManifest> ReadManifest(int dir_fd) {
  const std::string directory = DescribeFd(dir_fd);
  absl::StatusOr<SmallFile> marker = ReadFile(dir_fd, kCommitName, 4096);
  if (absl::IsNotFound(marker.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, " is not a complete checkpoint: it has no COMMIT"));
  }
  ZS_RETURN_IF_ERROR(marker.status());
  ZS_ASSIGN_OR_RETURN(const shard_format::Commit commit,
                      shard_format::DecodeCommit(marker->bytes, marker->path));
  absl::StatusOr<SmallFile> file = ReadFile(dir_fd, kManifestName, kMaxManifestBytes);
  if (absl::IsNotFound(file.status())) {
    return CorruptAt(absl::StrCat(directory, "/", kManifestName), 0, "the manifest is missing");
  }
  ZS_RETURN_IF_ERROR(file.status());
  if (file->bytes.size() != commit.manifest_bytes) {
    return CorruptAt(
        file->path, file->bytes.size(),
        absl::StrCat("the file ends here, ", commit.manifest_bytes, " bytes were expected"));
  }
  if (Xxh3_64(file->bytes) != commit.manifest_checksum) {
    return CorruptAt(file->path, 0, "the checksum of the manifest is wrong");
  }
  CheckpointManifest manifest;
  if (!manifest.ParseFromString(file->bytes)) {
    return CorruptAt(file->path, 0, "the manifest cannot be parsed");
  }
  return manifest;
}

// Whether every grain of every parameter that belongs into the checkpoint is there.
absl::Status CheckParametersAreCovered(const RecordMap& map, const Layout& layout,
                                       bool exclude_frozen) {
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const Unit& unit = layout.units()[u];
    if (exclude_frozen && !unit.trainable) continue;
    ZS_RETURN_IF_ERROR(map.Cover(u, kKindParameter, {0, unit.grains}).status());
  }
  return absl::OkStatus();
}

// Opens the shards of all workers, checks them against the job, and lists them in the manifest.
// Returns their bytes.
absl::StatusOr<uint64_t> CollectShards(int dir_fd, const Layout& layout, uint32_t workers,
                                       CheckpointManifest& manifest) {
  RecordMap map;
  uint64_t bytes = 0;
  manifest.clear_shards();
  for (uint32_t worker = 0; worker < workers; ++worker) {
    ZS_ASSIGN_OR_RETURN(const ShardReader reader,
                        ShardReader::Open(dir_fd, worker, IdentityOf(manifest)));
    ZS_RETURN_IF_ERROR(map.Add(worker, reader.records(), layout, reader.path()));
    records::v1::Shard& shard = *manifest.add_shards();
    shard.set_worker(worker);
    shard.set_bytes(reader.bytes());
    shard.set_checksum(reader.checksum());
    bytes += reader.bytes();
  }
  ZS_RETURN_IF_ERROR(map.Seal());
  ZS_RETURN_IF_ERROR(CheckParametersAreCovered(map, layout, manifest.exclude_frozen()));
  return bytes;
}

}  // namespace

absl::StatusOr<CheckpointWriter> CheckpointWriter::Create(int root_fd, const std::string& name) {
  ZS_ASSIGN_OR_RETURN(TemporaryDirectory directory, TemporaryDirectory::Create(root_fd, name));
  return CheckpointWriter(std::move(directory));
}

absl::StatusOr<uint64_t> CheckpointWriter::Commit(CheckpointManifest manifest,
                                                  uint32_t workers) && {
  // Owned here, so that after an error all of it is removed.
  TemporaryDirectory directory = std::move(directory_);
  ZS_ASSIGN_OR_RETURN(const Layout layout, LayoutOf(manifest));
  ZS_ASSIGN_OR_RETURN(uint64_t bytes, CollectShards(directory.fd(), layout, workers, manifest));
  std::string text;
  if (manifest.ByteSizeLong() > kMaxManifestBytes || !manifest.SerializeToString(&text)) {
    return absl::InvalidArgumentError(absl::StrCat("the checkpoint's manifest has ",
                                                   manifest.ByteSizeLong(), " bytes, at most ",
                                                   kMaxManifestBytes, " are allowed"));
  }
  ZS_RETURN_IF_ERROR(WriteFile(directory.fd(), kManifestName, text));
  const std::string marker = shard_format::EncodeCommit({text.size(), Xxh3_64(text)});
  ZS_RETURN_IF_ERROR(WriteFile(directory.fd(), kCommitName, marker));
  ZS_FAULT_STATUS("storage.checkpoint.commit");
  ZS_RETURN_IF_ERROR(std::move(directory).Commit());
  return bytes + text.size() + marker.size();
}

absl::StatusOr<CheckpointReader> CheckpointReader::OpenByName(int root_fd,
                                                              const std::string& name) {
  ZS_RETURN_IF_ERROR(ValidateName(name));
  ZS_ASSIGN_OR_RETURN(const UniqueFd fd, OpenBeneath(root_fd, name, O_RDONLY | O_DIRECTORY));
  return Open(fd.get());
}

absl::StatusOr<CheckpointReader> CheckpointReader::Open(int dir_fd) {
  ZS_ASSIGN_OR_RETURN(CheckpointManifest manifest, ReadManifest(dir_fd));
  absl::StatusOr<Layout> layout = LayoutOf(manifest);
  if (!layout.ok()) {
    return CorruptAt(absl::StrCat(DescribeFd(dir_fd), "/", kManifestName), 0,
                     Std(layout.status().message()));
  }
  CheckpointReader reader(*std::move(layout));
  reader.manifest_ = std::move(manifest);
  ZS_RETURN_IF_ERROR(reader.OpenShards(dir_fd));
  return reader;
}

absl::Status CheckpointReader::OpenShards(int dir_fd) {
  for (const records::v1::Shard& shard : manifest_.shards()) {
    ZS_ASSIGN_OR_RETURN(ShardReader reader,
                        ShardReader::Open(dir_fd, shard.worker(), IdentityOf(manifest_)));
    if (reader.bytes() != shard.bytes() || reader.checksum() != shard.checksum()) {
      return CorruptAt(reader.path(), reader.bytes(),
                       "the shard is not the one that the manifest lists");
    }
    ZS_RETURN_IF_ERROR(map_.Add(shards_.size(), reader.records(), layout_, reader.path()));
    bytes_ += reader.bytes();
    shards_.push_back(std::move(reader));
  }
  ZS_RETURN_IF_ERROR(map_.Seal());
  return CheckParametersAreCovered(map_, layout_, manifest_.exclude_frozen());
}

absl::Status CheckpointReader::Read(uint32_t unit, GrainRange grains, std::string_view kind,
                                    RecordType type, std::span<std::byte> out) {
  const bool inside = unit < layout_.units().size() && grains.begin <= grains.end &&
                      grains.end <= layout_.units()[unit].grains;
  if (!inside || out.size() != grains.size() * type.grain_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("grains [", grains.begin, ", ", grains.end,
                                                   ") of unit ", unit, " into ", out.size(),
                                                   " bytes"));
  }
  ZS_ASSIGN_OR_RETURN(const std::span<const RecordPlace> places, map_.Cover(unit, kind, grains));
  for (const RecordPlace& place : places) {
    const ShardRecord& record = place.record;
    if (!(record.type == type)) {
      return absl::InvalidArgumentError(absl::StrCat(Abs(kind), " of unit ", unit, " was saved as ",
                                                     Abs(record.type.name()), ", it is wanted as ",
                                                     Abs(type.name())));
    }
    const GrainRange part = {std::max(grains.begin, record.grains.begin),
                             std::min(grains.end, record.grains.end)};
    const uint64_t grain_bytes = type.grain_bytes();
    ZS_RETURN_IF_ERROR(ReadPart(
        place, part,
        out.subspan((part.begin - grains.begin) * grain_bytes, part.size() * grain_bytes)));
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::ReadPart(const RecordPlace& place, GrainRange part,
                                        std::span<std::byte> out) {
  const ShardRecord& record = place.record;
  const ShardReader& shard = shards_[place.shard];
  if (part == record.grains) return shard.Read(record, out);
  if (held_ != &place) {
    held_ = nullptr;
    held_bytes_.resize(record.bytes);
    ZS_RETURN_IF_ERROR(shard.Read(record, held_bytes_));
    held_ = &place;
  }
  const uint64_t grain_bytes = record.type.grain_bytes();
  std::memcpy(out.data(), held_bytes_.data() + (part.begin - record.grains.begin) * grain_bytes,
              out.size());
  return absl::OkStatus();
}

absl::Status CheckpointReader::Verify() {
  std::vector<std::byte> buffer;
  for (const RecordPlace* place : map_.All()) {
    buffer.resize(place->record.bytes);
    ZS_RETURN_IF_ERROR(shards_[place->shard].Read(place->record, buffer));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
