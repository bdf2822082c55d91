// sources: storage/journal.cc storage/journal_frame.cc storage/file_io.cc storage/named_dir.cc
// sources: base/checksum.cc base/fault_point.cc base/random_token.cc base/check.cc
// sources: base/status.cc base/unique_fd.cc
// libs: absl_status absl_statusor absl_strings absl_str_format absl_time -lxxhash
// seeds: tests/fuzz/seeds/journal

// Any bytes as a journal: replay ends with an error or with records that are whole; after it the
// journal can be appended to and gives the same records again. Bytes after a leading 'R' are taken
// as they are; all else is a list of edits to a well-formed journal, because no fuzzer guesses a
// checksum.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "storage/file_io.h"
#include "storage/journal.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

using Records = std::vector<std::string>;

constexpr char kName[] = "journal";
const Records kOriginal = {"first", std::string(700, 'x'), "third"};

void Require(bool condition) {
  if (!condition) std::abort();
}

// A directory in memory, made once and removed at the end.
class Directory {
 public:
  Directory() {
    char path[] = "/dev/shm/zs-fuzz-XXXXXX";
    Require(::mkdtemp(path) != nullptr);
    path_ = path;
    fd_ = *OpenDirectory(path_);
  }
  ~Directory() {
    ::unlinkat(fd_.get(), kName, 0);
    ::unlinkat(fd_.get(), ".new-journal", 0);
    ::rmdir(path_.c_str());
  }
  int fd() const { return fd_.get(); }

 private:
  std::string path_;
  UniqueFd fd_;
};

absl::StatusOr<std::unique_ptr<Journal>> Open(int dir_fd, Records& records) {
  return Journal::Open(dir_fd, kName, [&](uint64_t, std::string_view payload) {
    records.emplace_back(payload);
    return absl::OkStatus();
  });
}

void Write(int dir_fd, std::string_view bytes) {
  const UniqueFd fd = *OpenBeneath(dir_fd, kName, O_RDWR | O_CREAT | O_TRUNC);
  Require(WriteAllAt(fd.get(), AsBytes(bytes), 0, kName).ok());
}

std::string WellFormed(int dir_fd) {
  ::unlinkat(dir_fd, kName, 0);
  Records none;
  std::unique_ptr<Journal> journal = *Open(dir_fd, none);
  for (const std::string& record : kOriginal) Require(journal->Append(record).ok());
  std::string bytes(journal->bytes(), '\0');
  const UniqueFd fd = *OpenBeneath(dir_fd, kName, O_RDONLY);
  Require(ReadAllAt(fd.get(), std::as_writable_bytes(std::span<char>(bytes)), 0, kName).ok());
  return bytes;
}

// Each 4 bytes: position (16 bits), operation, operand.
std::string Edit(std::string bytes, std::string_view edits) {
  for (size_t i = 0; i + 4 <= edits.size(); i += 4) {
    const auto byte = [&](size_t k) { return static_cast<uint8_t>(edits[i + k]); };
    const size_t at = (byte(0) | byte(1) << 8) % (bytes.size() + 1);
    switch (byte(2) % 4) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ byte(3));
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        if (bytes.size() < 16384) bytes.insert(at, byte(3), '\0');
        break;
      case 3:
        if (bytes.size() < 16384) bytes += bytes.substr(at / 512 * 512, 512);
        break;
    }
  }
  return bytes;
}

void Run(std::string_view input) {
  static Directory directory;
  static const std::string kWellFormed = WellFormed(directory.fd());
  const bool raw = input.starts_with('R');
  Write(directory.fd(), raw ? std::string(input.substr(1)) : Edit(kWellFormed, input));
  Records records;
  {
    auto journal = Open(directory.fd(), records);
    if (!journal.ok()) return;
    if (!raw) {
      Require(records.size() <= kOriginal.size());
      for (size_t i = 0; i < records.size(); ++i) Require(records[i] == kOriginal[i]);
    }
    Require((*journal)->Append("appended").ok());
  }
  records.push_back("appended");
  Records again;
  Require(Open(directory.fd(), again).ok());
  Require(again == records);
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  zeroshard::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
