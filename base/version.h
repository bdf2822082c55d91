// The version of the daemon, its workers and its tools.

#ifndef ZEROSHARD_BASE_VERSION_H_
#define ZEROSHARD_BASE_VERSION_H_

namespace zeroshard {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_VERSION_H_
