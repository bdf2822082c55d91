// The version of the daemon and its tools.

#ifndef ZEROSHARD_SERVER_VERSION_H_
#define ZEROSHARD_SERVER_VERSION_H_

namespace zeroshard {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_VERSION_H_
