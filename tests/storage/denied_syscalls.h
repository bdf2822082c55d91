// Runs a function in a child process that a seccomp filter denies some system calls, as container
// runtimes do with those of io_uring.
#ifndef ZEROSHARD_TESTS_STORAGE_DENIED_SYSCALLS_H_
#define ZEROSHARD_TESTS_STORAGE_DENIED_SYSCALLS_H_

#include <functional>
#include <string>
#include <vector>

namespace zeroshard {

// What `function` returned there; "signal N" or "exit N" when the child did not come to its end.
// In the child each of `calls` (SYS_...) fails with errno `error`.
std::string RunWithDeniedCalls(const std::vector<int>& calls, int error,
                               const std::function<std::string()>& function);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_DENIED_SYSCALLS_H_
