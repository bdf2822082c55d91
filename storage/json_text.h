// JsonString: a JSON string literal. Pure.
#ifndef ZEROSHARD_STORAGE_JSON_TEXT_H_
#define ZEROSHARD_STORAGE_JSON_TEXT_H_

#include <string>
#include <string_view>

namespace zeroshard {

// `text`, which must be UTF-8, in quotes: quotes, backslashes and control characters are escaped,
// all else stays as it is (RFC 8259).
std::string JsonString(std::string_view text);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_JSON_TEXT_H_
