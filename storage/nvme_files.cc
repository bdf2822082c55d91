#include "storage/nvme_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/extent_file.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

constexpr std::string_view kTemporaryPrefix = ".tmp-";
constexpr std::string_view kManifestMagic = "ZSNVMAN1";

// What a name says.
struct ParsedName {
  uint64_t job_id = 0;
  uint32_t worker = 0;
  uint32_t path = 0;
  bool manifest = false;
};

// Takes a number off the front of `text`.
template <typename T>
bool TakeNumber(std::string_view& text, T& value, int base) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

bool TakePrefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Nothing for a name that ExtentFileName and ManifestFileName do not make.
std::optional<ParsedName> ParseName(const std::string& name) {
  ParsedName parsed;
  std::string_view rest = name;
  if (!TakePrefix(rest, "job-") || !TakeNumber(rest, parsed.job_id, 16) ||
      !TakePrefix(rest, ".w") || !TakeNumber(rest, parsed.worker, 10)) {
    return std::nullopt;
  }
  parsed.manifest = !TakePrefix(rest, ".p");
  if (!parsed.manifest && !TakeNumber(rest, parsed.path, 10)) return std::nullopt;
  const std::string made = parsed.manifest
                               ? ManifestFileName(parsed.job_id, parsed.worker)
                               : ExtentFileName(parsed.job_id, parsed.worker, parsed.path);
  if (made != name) return std::nullopt;
  return parsed;
}

// OK for a manifest file: a copy with its magic number, or not yet used.
absl::Status CheckManifest(int fd, const std::string& name) {
  ZS_ASSIGN_OR_RETURN(const uint64_t size, RegularFileSize(fd, name));
  for (uint64_t offset : {uint64_t{0}, size / 2}) {
    std::string magic(kManifestMagic.size(), '\0');
    ZS_RETURN_IF_ERROR(
        ReadAllAt(fd, std::as_writable_bytes(std::span(magic.data(), magic.size())), offset, name));
    if (magic != kManifestMagic && magic != std::string(magic.size(), '\0')) {
      return CorruptAt(name, offset, "no manifest: the magic number differs");
    }
  }
  return absl::OkStatus();
}

// OK when the file is what its name says.
absl::Status CheckContent(int fd, const ParsedName& parsed, const std::string& name) {
  if (parsed.manifest) return CheckManifest(fd, name);
  ZS_ASSIGN_OR_RETURN(const ExtentIdentity identity, ReadExtentIdentity(fd, name));
  if (identity.job_id == parsed.job_id && identity.worker == parsed.worker &&
      identity.path == parsed.path) {
    return absl::OkStatus();
  }
  return CorruptAt(
      name, 0,
      Std(absl::StrCat("its superblock is that of ",
                       ExtentFileName(identity.job_id, identity.worker, identity.path))));
}

absl::StatusOr<NvmeFile> Classify(const NvmePath& path, const std::string& name,
                                  absl::FunctionRef<bool(uint64_t job)> exists) {
  NvmeFile file;
  file.name = name;
  struct stat info = {};
  if (::fstatat(path.directory.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return ErrnoError(errno, "stat", absl::StrCat(DescribeFd(path.directory.get()), "/", name));
  }
  file.bytes = static_cast<uint64_t>(info.st_blocks) * 512;
  const std::optional<ParsedName> parsed = ParseName(name);
  if (!S_ISREG(info.st_mode)) {
    file.reason = "not a regular file";
  } else if (name.starts_with(kTemporaryPrefix)) {
    file.kind = NvmeFileKind::kTemporary;
    file.reason = "it was being created when its process died";
  } else if (!parsed.has_value()) {
    file.reason = "its name is not one of this format";
  }
  if (!file.reason.empty()) return file;

  ZS_ASSIGN_OR_RETURN(const UniqueFd fd, OpenBeneath(path.directory.get(), name, O_RDONLY));
  if (absl::Status content = CheckContent(fd.get(), *parsed, DescribeFd(fd.get())); !content.ok()) {
    file.reason = std::string(content.message());
    return file;
  }
  file.job_id = parsed->job_id;
  ZS_ASSIGN_OR_RETURN(const bool in_use, ExtentInUse(fd.get(), name));
  const bool live = in_use || exists(parsed->job_id);
  file.kind = live ? NvmeFileKind::kLive : NvmeFileKind::kStale;
  const std::string job = absl::StrCat("job ", absl::Hex(parsed->job_id, absl::kZeroPad16));
  file.reason = in_use ? absl::StrCat("a worker of ", job, " uses it")
                       : absl::StrCat(job, live ? " exists" : " does not exist");
  return file;
}

}  // namespace

absl::StatusOr<std::vector<NvmeFile>> ListNvmeFiles(const NvmePath& path,
                                                    absl::FunctionRef<bool(uint64_t job)> exists) {
  ZS_ASSIGN_OR_RETURN(std::vector<std::string> names, ListNames(path.directory.get()));
  std::erase(names, "lock");
  std::sort(names.begin(), names.end());
  std::vector<NvmeFile> files;
  for (const std::string& name : names) {
    ZS_ASSIGN_OR_RETURN(NvmeFile file, Classify(path, name, exists));
    files.push_back(std::move(file));
  }
  return files;
}

absl::Status RemoveNvmeFile(const NvmePath& path, const NvmeFile& file) {
  ZS_ASSIGN_OR_RETURN(const NvmeFile now,
                      Classify(path, file.name, [](uint64_t) { return false; }));
  const bool removable = file.kind == NvmeFileKind::kStale || file.kind == NvmeFileKind::kTemporary;
  const std::string name = absl::StrCat(DescribeFd(path.directory.get()), "/", file.name);
  if (!removable || now.kind != file.kind) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, " is not removed: ", removable ? now.reason : file.reason));
  }
  if (::unlinkat(path.directory.get(), file.name.c_str(), 0) != 0) {
    return ErrnoError(errno, "remove", name);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> RemoveNvmeFilesOfJob(const NvmePath& path, uint64_t job_id) {
  ZS_ASSIGN_OR_RETURN(const std::vector<NvmeFile> files,
                      ListNvmeFiles(path, [&](uint64_t job) { return job != job_id; }));
  uint64_t bytes = 0;
  for (const NvmeFile& file : files) {
    const bool own = file.job_id == job_id && file.kind != NvmeFileKind::kForeign &&
                     file.kind != NvmeFileKind::kTemporary;
    if (!own) continue;
    ZS_RETURN_IF_ERROR(RemoveNvmeFile(path, file));
    bytes += file.bytes;
  }
  if (bytes > 0) ZS_RETURN_IF_ERROR(SyncDirectory(path.directory.get()));
  return bytes;
}

}  // namespace zeroshard
