#include "server/hjson_text.h"

#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/charconv.h"
#include "server/hjson.h"
#include "server/text.h"

namespace zeroshard {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

void AppendUtf8(std::uint32_t code, std::string& out) {
  const auto byte = [&out](std::uint32_t value) { out.push_back(static_cast<char>(value)); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | (code >> 6));
    byte(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    byte(0xE0 | (code >> 12));
    byte(0x80 | ((code >> 6) & 0x3F));
    byte(0x80 | (code & 0x3F));
  } else {
    byte(0xF0 | (code >> 18));
    byte(0x80 | ((code >> 12) & 0x3F));
    byte(0x80 | ((code >> 6) & 0x3F));
    byte(0x80 | (code & 0x3F));
  }
}

std::optional<std::uint32_t> FourHexDigits(std::string_view text) {
  if (text.size() < 4) return std::nullopt;
  std::uint32_t value = 0;
  for (const char c : text.substr(0, 4)) {
    if (std::isxdigit(static_cast<unsigned char>(c)) == 0) return std::nullopt;
    const int digit = IsDigit(c) ? c - '0' : std::tolower(static_cast<unsigned char>(c)) - 'a' + 10;
    value = value * 16 + static_cast<std::uint32_t>(digit);
  }
  return value;
}

absl::StatusOr<Escape> DecodeUnicode(std::string_view text) {
  const std::optional<std::uint32_t> first = FourHexDigits(text.substr(2));
  if (!first.has_value()) return absl::InvalidArgumentError("\\u needs four hexadecimal digits");
  Escape escape{.text = "", .consumed = 6};
  std::uint32_t code = *first;
  if (code >= 0xD800 && code < 0xDC00 && text.size() >= 8 && text[6] == '\\' && text[7] == 'u') {
    const std::optional<std::uint32_t> second = FourHexDigits(text.substr(8));
    if (second.has_value() && *second >= 0xDC00 && *second < 0xE000) {
      code = 0x10000 + ((code - 0xD800) << 10) + (*second - 0xDC00);
      escape.consumed = 12;
    }
  }
  if (code >= 0xD800 && code < 0xE000) {
    return absl::InvalidArgumentError("half of a surrogate pair in text");
  }
  if (code == 0) return absl::InvalidArgumentError("\\u0000 is not taken in text");
  AppendUtf8(code, escape.text);
  return escape;
}

// Length of the well-formed sequence at the start of `text`, or 0.
std::size_t Utf8SequenceLength(std::string_view text) {
  const auto at = [&text](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const auto continues = [&at](std::size_t i) { return (at(i) & 0xC0U) == 0x80U; };
  const unsigned lead = at(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (!continues(1) || !continues(2)) return 0;
    const bool overlong = lead == 0xE0 && at(1) < 0xA0;
    const bool surrogate = lead == 0xED && at(1) >= 0xA0;
    return overlong || surrogate ? 0 : 3;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    const bool overlong = lead == 0xF0 && at(1) < 0x90;
    const bool too_large = lead == 0xF4 && at(1) >= 0x90;
    return overlong || too_large ? 0 : 4;
  }
  return 0;
}

}  // namespace

std::size_t FindInvalidUtf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const std::size_t length = Utf8SequenceLength(text.substr(i));
    if (length == 0) return i;
    i += length;
  }
  return std::string_view::npos;
}

absl::StatusOr<Escape> DecodeEscape(std::string_view text) {
  if (text.size() < 2) return absl::InvalidArgumentError("the text ends in a backslash");
  constexpr std::string_view kNames = "\"'\\/bfnrt";
  constexpr std::string_view kBytes = "\"'\\/\b\f\n\r\t";
  if (text[1] == 'u') return DecodeUnicode(text);
  const std::size_t index = kNames.find(text[1]);
  if (index == std::string_view::npos) return absl::InvalidArgumentError("unknown escape in text");
  return Escape{.text = std::string(1, kBytes[index]), .consumed = 2};
}

bool IsNumberLexeme(std::string_view word) {
  if (word == "NaN" || word == "Infinity" || word == "-Infinity" || word == "+Infinity")
    return true;
  std::size_t i = 0;
  std::size_t digits = 0;
  if (i < word.size() && (word[i] == '-' || word[i] == '+')) ++i;
  for (; i < word.size() && IsDigit(word[i]); ++i) ++digits;
  if (i < word.size() && word[i] == '.') {
    for (++i; i < word.size() && IsDigit(word[i]); ++i) ++digits;
  }
  if (digits == 0) return false;
  if (i < word.size() && (word[i] == 'e' || word[i] == 'E')) {
    ++i;
    if (i < word.size() && (word[i] == '-' || word[i] == '+')) ++i;
    const std::size_t exponent = i;
    while (i < word.size() && IsDigit(word[i])) ++i;
    if (i == exponent) return false;
  }
  return i == word.size();
}

std::string CanonicalLexeme(std::string_view lexeme) {
  std::string out;
  if (!lexeme.empty() && lexeme.front() == '-') out.push_back('-');
  if (!lexeme.empty() && (lexeme.front() == '-' || lexeme.front() == '+')) lexeme.remove_prefix(1);
  if (lexeme.empty() || (!IsDigit(lexeme.front()) && lexeme.front() != '.')) {
    return out.append(lexeme);
  }
  const auto take_digits = [&lexeme] {
    std::size_t end = 0;
    while (end < lexeme.size() && IsDigit(lexeme[end])) ++end;
    const std::string_view digits = lexeme.substr(0, end);
    lexeme.remove_prefix(end);
    return digits;
  };
  std::string_view whole = take_digits();
  while (whole.size() > 1 && whole.front() == '0') whole.remove_prefix(1);
  out.append(whole.empty() ? "0" : whole);
  if (!lexeme.empty() && lexeme.front() == '.') {
    lexeme.remove_prefix(1);
    const std::string_view fraction = take_digits();
    if (!fraction.empty()) out.append(".").append(fraction);
  }
  return out.append(lexeme);
}

std::optional<double> NumberValue(std::string_view lexeme) {
  if (!IsNumberLexeme(lexeme)) return std::nullopt;
  if (lexeme == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (lexeme.front() == '+') lexeme.remove_prefix(1);
  if (lexeme == "Infinity") return std::numeric_limits<double>::infinity();
  if (lexeme == "-Infinity") return -std::numeric_limits<double>::infinity();
  double value = 0;
  const absl::from_chars_result result =
      absl::from_chars(lexeme.data(), lexeme.data() + lexeme.size(), value);
  // On overflow from_chars stores the largest finite number; the caller wants to see it.
  if (result.ec == std::errc::result_out_of_range && std::abs(value) > 1) {
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
  return value;
}

}  // namespace zeroshard
