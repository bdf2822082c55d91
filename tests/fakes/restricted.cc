// restricted PROGRAM [ARGUMENT...]: runs a program as an unprivileged user in a container might.
//
// Without root's rights (user and group 65534, when started by root), with 8 MiB that may be
// locked, and with io_uring denied by a seccomp filter (EPERM), as container runtimes do.
#include <errno.h>
#include <grp.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <iostream>

#include "tests/storage/denied_syscalls.h"

namespace {

constexpr unsigned kNobody = 65534;
constexpr rlim_t kLocked = 8 << 20;

// The name of what failed, or null.
const char* DropRights() {
  const rlimit limit = {kLocked, kLocked};
  if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "setrlimit";
  if (::geteuid() != 0) return nullptr;
  if (::setgroups(0, nullptr) != 0) return "setgroups";
  if (::setresgid(kNobody, kNobody, kNobody) != 0) return "setresgid";
  if (::setresuid(kNobody, kNobody, kNobody) != 0) return "setresuid";
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: restricted PROGRAM [ARGUMENT...]\n";
    return 2;
  }
  if (const char* failed = DropRights(); failed != nullptr) {
    std::cerr << "restricted: " << failed << ": " << strerror(errno) << "\n";
    return 126;
  }
  zeroshard::DenySyscalls({SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register}, EPERM);
  ::execvp(argv[1], argv + 1);
  std::cerr << "restricted: " << argv[1] << ": " << strerror(errno) << "\n";
  return 127;
}
