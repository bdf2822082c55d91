#include "storage/nvme_manifest.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/checksum.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/bytes.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x314e414d564e535aULL;  // "ZSNVMAN1"
constexpr uint32_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 512;
constexpr uint64_t kPage = 4096;

struct ManifestHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t worker;
  uint64_t job_id;
  uint64_t layout_fingerprint;
  uint64_t plan_fingerprint;
  uint64_t sequence;
  uint64_t generation;
  uint64_t attempt;
  uint64_t step;
  uint32_t chunks;
  uint32_t extra_bytes;
  uint64_t body_checksum;
  uint64_t revision;
  uint64_t zeros[51];
  uint64_t checksum;
};
static_assert(sizeof(ManifestHeader) == kHeaderBytes);

struct ManifestEntry {
  uint32_t slot;
  uint32_t zero;
  uint64_t generation;
  uint64_t attempt;
  uint64_t step;
  uint64_t checksum;
};
static_assert(sizeof(ManifestEntry) == 40);

uint64_t HeaderChecksum(const ManifestHeader& header) {
  return Xxh3_64(&header, offsetof(ManifestHeader, checksum));
}

bool AllZero(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char c) { return c == 0; });
}

absl::Status CheckHeader(const ManifestHeader& header, const ManifestIdentity& identity,
                         const std::string& file, uint64_t offset) {
  const struct {
    const char* what;
    uint64_t found, expected;
  } fields[] = {{"magic of the manifest", header.magic, kMagic},
                {"version of the manifest", header.version, kVersion},
                {"header checksum of the manifest", HeaderChecksum(header), header.checksum},
                {"job of the manifest", header.job_id, identity.job_id},
                {"layout of the manifest", header.layout_fingerprint, identity.layout_fingerprint},
                {"plan of the manifest", header.plan_fingerprint, identity.plan_fingerprint},
                {"worker of the manifest", header.worker, identity.worker},
                {"chunks of the manifest", header.chunks, identity.chunks}};
  for (const auto& field : fields) {
    if (field.found == field.expected) continue;
    return CorruptAt(
        file, offset,
        Std(absl::StrCat(field.what, ": ", field.found, ", expected ", field.expected)));
  }
  if (header.extra_bytes > identity.max_extra) {
    return CorruptAt(file, offset,
                     Std(absl::StrCat("manifest with ", header.extra_bytes, " extra bytes of ",
                                      identity.max_extra)));
  }
  return absl::OkStatus();
}

std::string StateText(const ManifestState& state) {
  return absl::StrCat("step ", state.step, " (attempt ", state.attempt,
                      state.revision > 0 ? absl::StrCat(", revision ", state.revision) : "", ")");
}

}  // namespace

uint64_t ManifestCopyBytes(const ManifestIdentity& identity) {
  return RoundUpTo(
      kHeaderBytes + uint64_t{identity.chunks} * sizeof(ManifestEntry) + identity.max_extra, kPage);
}

absl::StatusOr<std::string> EncodeManifest(const ManifestIdentity& identity,
                                           const NvmeManifest& manifest) {
  if (manifest.images.size() != identity.chunks || manifest.extra.size() > identity.max_extra ||
      identity.max_extra > kMaxManifestExtra) {
    return absl::InvalidArgumentError(
        absl::StrCat("a manifest of ", manifest.images.size(), " chunks and ",
                     manifest.extra.size(), " extra bytes; ", identity.chunks,
                     " chunks and at most ", identity.max_extra, " bytes are expected"));
  }
  std::string body;
  for (const SlotImage& image : manifest.images) {
    const ManifestEntry entry = {image.slot,    0,          image.generation,
                                 image.attempt, image.step, image.checksum};
    body.append(reinterpret_cast<const char*>(&entry), sizeof(entry));
  }
  body.append(manifest.extra);
  ManifestHeader header = {};
  header.magic = kMagic;
  header.version = kVersion;
  header.worker = identity.worker;
  header.job_id = identity.job_id;
  header.layout_fingerprint = identity.layout_fingerprint;
  header.plan_fingerprint = identity.plan_fingerprint;
  header.sequence = manifest.sequence;
  header.generation = manifest.generation;
  header.attempt = manifest.attempt;
  header.step = manifest.step;
  header.revision = manifest.revision;
  header.chunks = identity.chunks;
  header.extra_bytes = static_cast<uint32_t>(manifest.extra.size());
  header.body_checksum = Xxh3_64(body);
  header.checksum = HeaderChecksum(header);
  std::string copy(reinterpret_cast<const char*>(&header), sizeof(header));
  copy.append(body);
  copy.resize(ManifestCopyBytes(identity), '\0');
  return copy;
}

absl::StatusOr<NvmeManifest> DecodeManifest(std::string_view copy, const ManifestIdentity& identity,
                                            const std::string& file, uint64_t offset) {
  if (copy.size() != ManifestCopyBytes(identity)) {
    return absl::InvalidArgumentError(absl::StrCat("a manifest copy of ", copy.size(), " bytes"));
  }
  ManifestHeader header;
  std::memcpy(&header, copy.data(), sizeof(header));
  ZS_RETURN_IF_ERROR(CheckHeader(header, identity, file, offset));
  const uint64_t entries = uint64_t{header.chunks} * sizeof(ManifestEntry);
  const std::string_view body = copy.substr(kHeaderBytes, entries + header.extra_bytes);
  if (Xxh3_64(body) != header.body_checksum) {
    return CorruptAt(file, offset + kHeaderBytes, "torn or flipped entries of the manifest");
  }
  NvmeManifest manifest;
  manifest.sequence = header.sequence;
  manifest.generation = header.generation;
  manifest.attempt = header.attempt;
  manifest.step = header.step;
  manifest.revision = header.revision;
  for (uint32_t chunk = 0; chunk < header.chunks; ++chunk) {
    ManifestEntry entry;
    std::memcpy(&entry, body.data() + chunk * sizeof(entry), sizeof(entry));
    manifest.images.push_back(
        {entry.slot, entry.generation, entry.attempt, entry.step, entry.checksum});
  }
  manifest.extra = body.substr(entries);
  return manifest;
}

absl::StatusOr<ManifestState> ChooseState(std::span<const std::vector<ManifestState>> workers) {
  std::optional<ManifestState> best;
  for (const ManifestState& state :
       workers.empty() ? std::vector<ManifestState>{} : workers.front()) {
    const bool everywhere = std::all_of(workers.begin(), workers.end(), [&](const auto& states) {
      return std::find(states.begin(), states.end(), state) != states.end();
    });
    if (everywhere && (!best.has_value() || *best < state)) best = state;
  }
  if (best.has_value()) return *best;
  std::vector<std::string> lines;
  for (size_t w = 0; w < workers.size(); ++w) {
    std::vector<std::string> states;
    for (const ManifestState& state : workers[w]) states.push_back(StateText(state));
    lines.push_back(
        absl::StrCat("worker ", w, " has ", states.empty() ? "none" : absl::StrJoin(states, ", ")));
  }
  return absl::DataLossError(absl::StrCat("no step is whole on the nvme paths of all workers: ",
                                          absl::StrJoin(lines, "; "), "; restore a checkpoint"));
}

absl::StatusOr<ManifestFile> ManifestFile::Create(int dir_fd, const std::string& name,
                                                  const ManifestIdentity& identity) {
  ZS_ASSIGN_OR_RETURN(TemporaryFile file, TemporaryFile::Create(dir_fd, name, Existing::kRefuse));
  const std::string zeros(2 * ManifestCopyBytes(identity), '\0');
  ZS_RETURN_IF_ERROR(ReserveSpace(file.fd(), zeros.size(), name));
  ZS_RETURN_IF_ERROR(WriteAllAt(file.fd(), AsBytes(zeros), 0, name));
  ZS_RETURN_IF_ERROR(std::move(file).Commit());
  return Open(dir_fd, name, identity);
}

absl::StatusOr<ManifestFile> ManifestFile::Open(int dir_fd, const std::string& name,
                                                const ManifestIdentity& identity) {
  ManifestFile file;
  ZS_ASSIGN_OR_RETURN(file.fd_, OpenBeneath(dir_fd, name, O_RDWR));
  file.path_ = DescribeFd(file.fd_.get());
  file.identity_ = identity;
  const uint64_t bytes = ManifestCopyBytes(identity);
  ZS_ASSIGN_OR_RETURN(const uint64_t size, RegularFileSize(file.fd_.get(), file.path_));
  if (size != 2 * bytes) {
    return CorruptAt(
        file.path_, 0,
        Std(absl::StrCat("a manifest file of ", size, " bytes, ", 2 * bytes, " expected")));
  }
  for (uint32_t copy = 0; copy < 2; ++copy) {
    ZS_ASSIGN_OR_RETURN(const std::string text, file.ReadCopy(copy));
    if (AllZero(text)) continue;
    auto manifest = DecodeManifest(text, identity, file.path_, copy * bytes);
    if (!manifest.ok()) {
      KeepFirstError(file.problem_, manifest.status());
      continue;
    }
    file.sequence_ = std::max(file.sequence_, manifest->sequence);
    const bool newer = !file.found_.empty() && manifest->sequence > file.found_[0].sequence;
    file.found_copy_.insert(newer ? file.found_copy_.begin() : file.found_copy_.end(), copy);
    file.found_.insert(newer ? file.found_.begin() : file.found_.end(), *std::move(manifest));
  }
  file.resumed_ = file.unused();
  return file;
}

std::vector<ManifestState> ManifestFile::states() const {
  std::vector<ManifestState> states;
  for (const NvmeManifest& manifest : found_) states.push_back(StateOf(manifest));
  return states;
}

std::optional<size_t> ManifestFile::Find(const ManifestState& state) const {
  for (size_t i = 0; i < found_.size(); ++i) {
    if (StateOf(found_[i]) == state) return i;
  }
  return std::nullopt;
}

const NvmeManifest* ManifestFile::CopyOf(const ManifestState& state) const {
  const std::optional<size_t> index = Find(state);
  return index.has_value() ? &found_[*index] : nullptr;
}

absl::StatusOr<NvmeManifest> ManifestFile::Resume(const ManifestState& state, uint64_t generation) {
  const std::optional<size_t> index = Find(state);
  if (!index.has_value()) {
    return absl::NotFoundError(absl::StrCat(path_, " does not hold ", StateText(state)));
  }
  NvmeManifest manifest = found_[*index];
  manifest.generation = generation;
  manifest.sequence = ++sequence_;
  ZS_RETURN_IF_ERROR(WriteCopy(1 - found_copy_[*index], manifest));
  committed_copy_ = 1 - found_copy_[*index];
  resumed_ = true;
  return manifest;
}

absl::Status ManifestFile::Adopt(const ManifestState& committed) {
  const std::optional<size_t> index = Find(committed);
  if (!index.has_value()) {
    return CorruptAt(path_, 0,
                     Std(absl::StrCat("the manifest of ", StateText(committed),
                                      ", which is committed, is not whole: ",
                                      problem_.ok() ? "it is not there" : problem_.message())));
  }
  ZS_RETURN_IF_ERROR(SyncFile(fd_.get(), path_));
  committed_copy_ = found_copy_[*index];
  resumed_ = true;
  return absl::OkStatus();
}

absl::Status ManifestFile::Prepare(NvmeManifest manifest) {
  if (!resumed_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, " holds a state that was neither resumed nor adopted"));
  }
  manifest.sequence = ++sequence_;
  return WriteCopy(1 - committed_copy_, manifest);
}

absl::Status ManifestFile::Revoke() {
  if (!resumed_) return absl::FailedPreconditionError(absl::StrCat(path_, " was not adopted"));
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadCopy(committed_copy_));
  ZS_ASSIGN_OR_RETURN(NvmeManifest committed,
                      DecodeManifest(text, identity_, path_, committed_copy_ * text.size()));
  return Prepare(std::move(committed));
}

absl::StatusOr<std::string> ManifestFile::ReadCopy(uint32_t copy) const {
  std::string text(ManifestCopyBytes(identity_), '\0');
  const auto bytes = std::as_writable_bytes(std::span(text.data(), text.size()));
  ZS_RETURN_IF_ERROR(ReadAllAt(fd_.get(), bytes, copy * text.size(), path_));
  return text;
}

// What lies behind the manifest is no part of it, whatever was there before.
absl::Status ManifestFile::WriteCopy(uint32_t copy, const NvmeManifest& manifest) {
  ZS_ASSIGN_OR_RETURN(const std::string text, EncodeManifest(identity_, manifest));
  const uint64_t used = RoundUpTo(
      kHeaderBytes + manifest.images.size() * sizeof(ManifestEntry) + manifest.extra.size(), kPage);
  const std::string_view written = std::string_view(text).substr(0, used);
  ZS_RETURN_IF_ERROR(WriteAllAt(fd_.get(), AsBytes(written), copy * text.size(), path_));
  return SyncFile(fd_.get(), path_);
}

}  // namespace zeroshard
