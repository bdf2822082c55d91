#include "tests/conformance/stalled_read.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "base/check.h"
#include "base/unique_fd.h"

namespace zeroshard {
namespace {

constexpr size_t kBytes = 4096;

class PipeStall final : public StalledRead {
 public:
  PipeStall() {
    int ends[2];
    ZS_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "a pipe");
    read_.reset(ends[0]);
    write_.reset(ends[1]);
  }
  ~PipeStall() override { Release(); }
  void Release() override {
    if (std::exchange(released_, true)) return;
    ZS_CHECK(::write(write_.get(), memory_.data(), kBytes) == kBytes, "a write to a pipe");
  }
  IoTransfer Transfer(uint64_t tag) override {
    return {.fd = read_.get(), .memory = target_.data(), .bytes = kBytes, .tag = tag};
  }

 private:
  UniqueFd read_;
  UniqueFd write_;
  std::array<std::byte, kBytes> memory_ = {};
  std::array<std::byte, kBytes> target_ = {};
  bool released_ = false;
};

class PageFaultStall final : public StalledRead {
 public:
  // False when the kernel does not allow it.
  bool Init() {
    faults_.reset(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC)));
    uffdio_api api = {};
    api.api = UFFD_API;
    if (!faults_.valid() || ::ioctl(faults_.get(), UFFDIO_API, &api) != 0) return false;
    memory_ = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ZS_CHECK(memory_ != MAP_FAILED, "a page");
    uffdio_register range = {};
    range.range = {reinterpret_cast<uintptr_t>(memory_), kBytes};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    if (::ioctl(faults_.get(), UFFDIO_REGISTER, &range) != 0) return false;
    file_.reset(::memfd_create("stalled", MFD_CLOEXEC));
    return file_.valid() && ::ftruncate(file_.get(), kBytes) == 0;
  }
  ~PageFaultStall() override {
    Release();
    if (memory_ != MAP_FAILED) ::munmap(memory_, kBytes);
  }
  void Release() override {
    if (!file_.valid() || std::exchange(released_, true)) return;
    uffdio_zeropage page = {};
    page.range = {reinterpret_cast<uintptr_t>(memory_), kBytes};
    ZS_CHECK(::ioctl(faults_.get(), UFFDIO_ZEROPAGE, &page) == 0, "a page for the reader");
  }
  IoTransfer Transfer(uint64_t tag) override {
    return {
        .fd = file_.get(), .memory = static_cast<std::byte*>(memory_), .bytes = kBytes, .tag = tag};
  }

 private:
  UniqueFd faults_;
  UniqueFd file_;
  void* memory_ = MAP_FAILED;
  bool released_ = false;
};

}  // namespace

std::unique_ptr<StalledRead> StallOnPipe() { return std::make_unique<PipeStall>(); }

std::unique_ptr<StalledRead> StallOnPageFault() {
  auto stall = std::make_unique<PageFaultStall>();
  if (!stall->Init()) return nullptr;
  return stall;
}

}  // namespace zeroshard
