#include "tests/conformance/small_file_system.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "base/check.h"

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

}  // namespace

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
