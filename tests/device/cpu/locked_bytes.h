// What a process has locked, and processes that may lock only so much.
#ifndef ZEROSHARD_TESTS_DEVICE_CPU_LOCKED_BYTES_H_
#define ZEROSHARD_TESTS_DEVICE_CPU_LOCKED_BYTES_H_

#include <sys/resource.h>

#include <cstdint>
#include <functional>
#include <string>

namespace zeroshard {

// VmLck of this process.
uint64_t LockedBytes();

// Runs `function` in a child without privileges under this limit and returns its text.
std::string RunWithLockLimit(const rlimit& limit, const std::function<std::string()>& function);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_DEVICE_CPU_LOCKED_BYTES_H_
