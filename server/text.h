#ifndef ZEROSHARD_SERVER_TEXT_H_
#define ZEROSHARD_SERVER_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/strings.h"

// absl::StrCat for messages made of many std::string_view.

namespace zeroshard {

namespace text_internal {
template <typename T>
const T& Part(const T& part) {
  return part;
}
inline absl::string_view Part(const std::string_view& part) { return Abs(part); }
}  // namespace text_internal

// The parts (text, numbers, absl::Hex ...) one after the other.
template <typename... Parts>
std::string Concat(const Parts&... parts) {
  return absl::StrCat(text_internal::Part(parts)...);
}

// At most `bytes` of the text, cut between characters of UTF-8, then "...".
inline std::string Shorten(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return std::string(text);
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0U) == 0x80U) --bytes;
  return Concat(text.substr(0, bytes), "...");
}

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_TEXT_H_
