// Unpredictable values from the kernel's generator. Any thread.

#ifndef ZEROSHARD_BASE_RANDOM_TOKEN_H_
#define ZEROSHARD_BASE_RANDOM_TOKEN_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace zeroshard {

// 256 random bits as 64 lower-case hexadecimal digits: a job's secret. Never log it.
std::string RandomToken();

// 64 random bits: an identifier.
uint64_t RandomId();

// Compares in a time that depends only on the lengths.
bool ConstantTimeEquals(std::string_view a, std::string_view b);

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_RANDOM_TOKEN_H_
