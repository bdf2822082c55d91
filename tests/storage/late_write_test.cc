// What the kernel really does with the writes of a killed process: on a throttled drive they land
// long after it was reaped, and ExtentFile::Drained tells when. Needs the right to throttle; skips
// without.
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/extent_file.h"
#include "storage/file_io.h"
#include "storage/io_uring_queue.h"
#include "tests/storage/nvme_fixture.h"

namespace zeroshard {
namespace {

constexpr uint64_t kWriteBytes = 1 << 20;
constexpr uint64_t kWrites = 4;
constexpr ExtentIdentity kIdentity{.job_id = 1, .file_bytes = (kWrites + 1) * kWriteBytes};

// A control group whose processes write 2 MiB/s to the disk of a directory.
class Throttle {
 public:
  explicit Throttle(const std::string& directory) {
    struct stat info = {};
    if (::stat(directory.c_str(), &info) != 0) return;
    const std::string device = absl::StrCat(major(info.st_dev), ":", minor(info.st_dev));
    const bool first = std::filesystem::exists("/sys/fs/cgroup/blkio");
    path_ = absl::StrCat(first ? "/sys/fs/cgroup/blkio" : "/sys/fs/cgroup", "/zs-", ::getpid());
    std::error_code error;
    if (!std::filesystem::create_directory(path_, error)) return;
    works_ = first ? Write("blkio.throttle.write_bps_device", device + " 2097152")
                   : Write("io.max", device + " wbps=2097152");
  }
  Throttle(const Throttle&) = delete;
  Throttle& operator=(const Throttle&) = delete;
  ~Throttle() { ::rmdir(path_.c_str()); }

  bool works() const { return works_; }
  // Puts the calling process into the group.
  bool Join() const { return Write("cgroup.procs", absl::StrCat(::getpid())); }

 private:
  bool Write(const std::string& name, const std::string& text) const {
    std::ofstream file(path_ + "/" + name);
    file << text << std::flush;
    return file.good();
  }

  std::string path_;
  bool works_ = false;
};

// Submits the writes, gives the kernel time to pass them on, and dies.
[[noreturn]] void WriteAndDie(const NvmePath& path, const Throttle& throttle) {
  if (!throttle.Join()) ::_exit(1);
  auto file = ExtentFile::Adopt(path, kIdentity, 1);
  auto queue = MakeIoUringQueue({});
  if (!file.ok() || !queue.ok()) ::_exit(2);
  const DirectBuffer buffer(kWriteBytes);
  std::fill(buffer.span().begin(), buffer.span().end(), std::byte{0x5a});
  for (uint64_t i = 0; i < kWrites; ++i) {
    const IoTransfer write{.operation = IoOperation::kWrite,
                           .fd = file->fd(),
                           .memory = buffer.span().data(),
                           .bytes = kWriteBytes,
                           .offset = (i + 1) * kWriteBytes};
    if (!(*queue)->Submit(write).ok()) ::_exit(3);
  }
  static_cast<void>((*queue)->Wait(kWrites, Deadline::After(absl::Milliseconds(300))));
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

uint64_t Landed(const ExtentFile& file) {
  uint64_t landed = 0;
  for (uint64_t i = 0; i < kWrites; ++i) {
    const DirectBuffer block(4096);
    EXPECT_TRUE(ReadAllAt(file.fd(), block.span(), (i + 2) * kWriteBytes - 4096, "extent").ok());
    landed += block.span()[0] == std::byte{0x5a} ? 1 : 0;
  }
  return landed;
}

TEST(LateWriteTest, DrainedTellsWhenTheWritesOfAReapedProcessHaveLanded) {
  const DiskDir dir;
  const NvmePath path = Admit(dir.path());
  const Throttle throttle(dir.path());
  if (!path.direct || !throttle.works()) GTEST_SKIP() << "the drive cannot be throttled here";
  ASSERT_TRUE(ExtentFile::Create(path, kIdentity).ok());
  const pid_t child = ::fork();
  if (child == 0) WriteAndDie(path, throttle);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status)) GTEST_SKIP() << "no io_uring here, exit " << WEXITSTATUS(status);

  const ExtentFile file = *ExtentFile::Adopt(path, kIdentity, 2);
  if (*file.Drained()) GTEST_SKIP() << "the drive was not throttled";
  EXPECT_LT(Landed(file), kWrites) << "there is something to wait for";
  ASSERT_TRUE(file.Flush().ok());
  const Deadline deadline = Deadline::After(absl::Seconds(30));
  while (!*file.Drained() && !deadline.Passed()) ::usleep(1000);
  ASSERT_TRUE(*file.Drained());
  EXPECT_EQ(Landed(file), kWrites);
}

}  // namespace
}  // namespace zeroshard
