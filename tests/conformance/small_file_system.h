// A small file system for one function, in a child process with mounts of its own.
#ifndef ZEROSHARD_TESTS_CONFORMANCE_SMALL_FILE_SYSTEM_H_
#define ZEROSHARD_TESTS_CONFORMANCE_SMALL_FILE_SYSTEM_H_

#include <functional>
#include <string>

namespace zeroshard {

inline constexpr int kNotAllowed = 77;

// Runs `check` with the path of a tmpfs of 1 MiB, or of another type of file system; 0 when it
// returned true, kNotAllowed when this process may not mount one, else how the child ended.
int RunOnSmallFileSystem(const std::function<bool(const std::string&)>& check,
                         const char* type = "tmpfs");

// The same with a descriptor, for O_DIRECT, of a failing block device of 16 MiB: a loop device over
// a file that lies on that file system and was cut to half a megabyte. Reads beyond that give EIO;
// writes have room for less than a megabyte.
int RunOnFailingDevice(const std::function<bool(int fd)>& check);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_CONFORMANCE_SMALL_FILE_SYSTEM_H_
