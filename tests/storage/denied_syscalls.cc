#include "tests/storage/denied_syscalls.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/unique_fd.h"

namespace zeroshard {
void DenySyscalls(const std::vector<int>& calls, int error) {
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  const uint32_t answer = SECCOMP_RET_ERRNO | static_cast<uint32_t>(error);
  for (const int call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, answer));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter = {static_cast<unsigned short>(program.size()), program.data()};
  ZS_CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
  ZS_CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "a seccomp filter");
}

std::string RunWithDeniedCalls(const std::vector<int>& calls, int error,
                               const std::function<std::string()>& function) {
  int ends[2];
  ZS_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "a pipe");
  const UniqueFd read(ends[0]);
  UniqueFd write(ends[1]);
  const pid_t child = ::fork();
  ZS_CHECK(child >= 0, "a child");
  if (child == 0) {
    DenySyscalls(calls, error);
    const std::string text = function();
    const bool sent =
        ::write(write.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
    ::_exit(sent ? 0 : 1);
  }
  write.reset();
  std::string text;
  char part[4096];
  ssize_t got = 0;
  while ((got = ::read(read.get(), part, sizeof(part))) > 0) text.append(part, got);
  int status = 0;
  ZS_CHECK(::waitpid(child, &status, 0) == child, "the end of the child");
  if (WIFSIGNALED(status)) return "signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return "exit " + std::to_string(WEXITSTATUS(status));
  return text;
}

}  // namespace zeroshard
