// A seccomp filter that denies system calls, as container runtimes do with those of io_uring: for
// this process, or for a function in a child.
#ifndef ZEROSHARD_TESTS_STORAGE_DENIED_SYSCALLS_H_
#define ZEROSHARD_TESTS_STORAGE_DENIED_SYSCALLS_H_

#include <functional>
#include <string>
#include <vector>

namespace zeroshard {

// From now on each of `calls` (SYS_...) fails with errno `error` in this thread, in the threads and
// children that it starts, and after exec.
void DenySyscalls(const std::vector<int>& calls, int error);

// What `function` returned there; "signal N" or "exit N" when the child did not come to its end.
// In the child each of `calls` (SYS_...) fails with errno `error`.
std::string RunWithDeniedCalls(const std::vector<int>& calls, int error,
                               const std::function<std::string()>& function);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_DENIED_SYSCALLS_H_
