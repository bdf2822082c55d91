#include "tests/conformance/small_file_system.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#include "base/check.h"
#include "base/unique_fd.h"

namespace zeroshard {
namespace {

bool OwnMounts() {
  const uid_t user = ::geteuid();
  const gid_t group = ::getegid();
  if (user == 0) {
    if (::unshare(CLONE_NEWNS) != 0) return false;
  } else {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
    std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

int Child(const std::string& directory, const std::function<bool(const std::string&)>& check,
          const char* type) {
  if (!OwnMounts()) return kNotAllowed;
  if (::mount(type, directory.c_str(), type, 0, "size=1m") != 0) return kNotAllowed;
  return check(directory) ? 0 : 1;
}

// A loop device for the file that goes when its last descriptor is closed; invalid where this
// process may not have one.
UniqueFd LoopDevice(int file) {
  const UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
  for (int attempt = 0; control.valid() && attempt < 10; ++attempt) {
    const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
    const std::string path = "/dev/loop" + std::to_string(number);
    UniqueFd device(::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
    loop_config config = {};
    config.fd = static_cast<uint32_t>(file);
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
    if (device.valid() && ::ioctl(device.get(), LOOP_CONFIGURE, &config) == 0) return device;
  }
  return UniqueFd();
}

}  // namespace

int RunOnFailingDevice(const std::function<bool(int fd)>& check) {
  return RunOnSmallFileSystem([&](const std::string& directory) {
    const std::string path = directory + "/device";
    const UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!file.valid() || ::ftruncate(file.get(), 16 << 20) != 0) return false;
    const UniqueFd device = LoopDevice(file.get());
    if (!device.valid()) ::_exit(kNotAllowed);
    if (::ftruncate(file.get(), 512 << 10) != 0) return false;
    return check(device.get());
  });
}

int RunOnSmallFileSystem(const std::function<bool(const std::string&)>& check, const char* type) {
  char directory[] = "/tmp/zs-small-XXXXXX";
  ZS_CHECK(::mkdtemp(directory) != nullptr, "a directory");
  const pid_t child = ::fork();
  ZS_CHECK(child >= 0, "a child");
  if (child == 0) ::_exit(Child(directory, check, type));
  int status = 0;
  ZS_CHECK(::waitpid(child, &status, 0) == child, "the end of the child");
  ::rmdir(directory);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace zeroshard
