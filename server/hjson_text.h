#ifndef ZEROSHARD_SERVER_HJSON_TEXT_H_
#define ZEROSHARD_SERVER_HJSON_TEXT_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

// The character level of server/hjson.h: UTF-8, escapes, and the forms of numbers.
// Pure functions on bounded input.

namespace zeroshard {

// Keys in one block; more is an error (a configuration has dozens).
inline constexpr std::size_t kMaxMembers = 1024;

// Offset of the first byte that is not part of well-formed UTF-8, or npos.
std::size_t FindInvalidUtf8(std::string_view text);

struct Escape {
  std::string text;          // UTF-8
  std::size_t consumed = 0;  // bytes, the backslash included
};

// Decodes the escape at the start of `text` (a backslash). \u0000 and lone surrogates are errors.
absl::StatusOr<Escape> DecodeEscape(std::string_view text);

// JSON's numbers, also with a leading '+', without digits on one side of the point; NaN,
// Infinity and -Infinity.
bool IsNumberLexeme(std::string_view word);

// Such a lexeme as strict JSON writes it: "+.5" is "0.5", "007" is "7", "5." is "5".
std::string CanonicalLexeme(std::string_view lexeme);

// The value of such a lexeme; overflow gives an infinity. Nothing when it is no number.
std::optional<double> NumberValue(std::string_view lexeme);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_HJSON_TEXT_H_
