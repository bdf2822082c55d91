#include "storage/io_write_counts.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/checksum.h"
#include "base/status.h"
#include "base/strings.h"
#include "base/unique_fd.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

constexpr char kTitle[] = "zeroshard-nvme-writes 1\n";
constexpr size_t kChecksumBytes = 22;  // "xxh3 <16 hex digits>\n"
constexpr uint64_t kMaxFileBytes = 1 << 20;
constexpr int64_t kMaxDay = 65535;
constexpr uint64_t kMaxWritten = 1ull << 56;

// Spaces, control characters and '%' as %XX, so that a path is one word.
std::string EscapePath(std::string_view path) {
  std::string word;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte <= ' ' || byte == '%' || byte == 0x7f) {
      absl::StrAppendFormat(&word, "%%%02X", byte);
    } else {
      word += c;
    }
  }
  return word;
}

std::string UnescapePath(std::string_view word) {
  std::string path;
  for (size_t i = 0; i < word.size(); ++i) {
    uint32_t byte = 0;
    if (word[i] == '%' && absl::SimpleHexAtoi(Abs(word.substr(i + 1, 2)), &byte)) {
      path += static_cast<char>(byte);
      i += 2;
    } else {
      path += word[i];
    }
  }
  return path;
}

std::string Checksum(std::string_view text) {
  return absl::StrFormat("xxh3 %016x\n", Xxh3_64(text));
}

}  // namespace

std::string FormatWriteCounts(const std::map<std::string, IoDay>& counts) {
  std::string text = kTitle;
  for (const auto& [path, count] : counts) {
    absl::StrAppendFormat(&text, "%d %d %s\n", count.day, count.written, EscapePath(path));
  }
  return text + Checksum(text);
}

absl::StatusOr<std::map<std::string, IoDay>> ParseWriteCounts(std::string_view text) {
  if (!text.starts_with("zeroshard-nvme-writes ")) return absl::DataLossError("no count of writes");
  if (!text.starts_with(kTitle)) return absl::DataLossError("a format of another version");
  const size_t body = text.size() - std::min(text.size(), kChecksumBytes);
  if (text.substr(body) != Checksum(text.substr(0, body))) {
    return absl::DataLossError("its checksum is not that of its text");
  }
  std::map<std::string, IoDay> counts;
  std::string_view rest = text.substr(0, body).substr(sizeof(kTitle) - 1);
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const std::vector<std::string> words = absl::StrSplit(Abs(rest.substr(0, end)), ' ');
    IoDay count;
    if (end == std::string_view::npos || words.size() != 3 ||
        !absl::SimpleAtoi(words[0], &count.day) || !absl::SimpleAtoi(words[1], &count.written) ||
        count.day < 0 || count.day > kMaxDay || count.written > kMaxWritten || words[2].empty()) {
      return absl::DataLossError("a line is not \"DAY BYTES PATH\"");
    }
    counts[UnescapePath(words[2])] = count;
    rest.remove_prefix(end + 1);
  }
  return counts;
}

absl::StatusOr<IoWriteCounts> IoWriteCounts::Load(int dir_fd) {
  IoWriteCounts counts(dir_fd);
  const absl::StatusOr<UniqueFd> fd = OpenBeneath(dir_fd, kFileName, O_RDONLY);
  if (absl::IsNotFound(fd.status())) return counts;
  if (!fd.ok()) return fd.status();
  const std::string name = DescribeFd(fd->get());
  ZS_ASSIGN_OR_RETURN(const uint64_t bytes, RegularFileSize(fd->get(), name));
  if (bytes > kMaxFileBytes) return CorruptAt(name, 0, "too long for a count of writes");
  std::string text(bytes, '\0');
  ZS_RETURN_IF_ERROR(
      ReadAllAt(fd->get(), std::as_writable_bytes(std::span(text.data(), text.size())), 0, name));
  absl::StatusOr<std::map<std::string, IoDay>> parsed = ParseWriteCounts(text);
  if (!parsed.ok()) return CorruptAt(name, 0, Std(parsed.status().message()));
  counts.earlier_ = *std::move(parsed);
  counts.saved_ = std::move(text);
  return counts;
}

void IoWriteCounts::Restore(const IoBudget& budget, uint32_t device) {
  const auto it = earlier_.find(budget.path(device));
  if (it == earlier_.end()) return;
  budget.AddEarlier(device, it->second);
  earlier_.erase(it);
}

absl::Status IoWriteCounts::Save(const IoBudget& budget) {
  std::map<std::string, IoDay> counts;
  for (uint32_t device = 0; device < budget.devices(); ++device) {
    const IoDay today = budget.today(device);
    counts[budget.path(device)] = today;
    std::erase_if(earlier_, [&](const auto& entry) { return entry.second.day < today.day; });
  }
  counts.insert(earlier_.begin(), earlier_.end());
  std::string text = FormatWriteCounts(counts);
  if (text == saved_) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(TemporaryFile file,
                      TemporaryFile::Create(dir_fd_, kFileName, Existing::kReplace));
  ZS_RETURN_IF_ERROR(WriteAllAt(file.fd(), AsBytes(text), 0, DescribeFd(file.fd())));
  ZS_RETURN_IF_ERROR(std::move(file).Commit());
  saved_ = std::move(text);
  return absl::OkStatus();
}

}  // namespace zeroshard
