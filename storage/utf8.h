// IsUtf8: whether bytes are well-formed UTF-8 (RFC 3629: no surrogates, no overlong forms, at most
// U+10FFFF). Names of parameters must be, because safetensors headers are JSON. Pure.
#ifndef ZEROSHARD_STORAGE_UTF8_H_
#define ZEROSHARD_STORAGE_UTF8_H_

#include <string_view>

namespace zeroshard {

bool IsUtf8(std::string_view text);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_UTF8_H_
