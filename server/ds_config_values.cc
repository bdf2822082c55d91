#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "base/status.h"
#include "server/ds_config_settings.h"
#include "server/hjson_text.h"
#include "server/text.h"

// The forms that a value may be written in, as DeepSpeed's blocks take them (pydantic's lax mode):
// 5e8 and 500000000.0 are integers, "500000000" is one too, "5e8" in quotes and 0.5 are not.
// Rows marked kStrict take numbers as numbers and booleans as booleans only.

namespace zeroshard {
namespace {

using Kind = JsonValue::Kind;

constexpr double kTwoTo63 = 9223372036854775808.0;

absl::Status Mismatch(const JsonValue& value, std::string_view expected) {
  return absl::InvalidArgumentError(
      Concat("is ", Shorten(RenderJson(value), 80), "; expected ", expected));
}

std::string NumberText(double value) {
  if (std::floor(value) == value && std::abs(value) < 1e15) {
    return Concat(static_cast<std::int64_t>(value));
  }
  return Concat(value);
}

// "a whole number from 0 to 3", "a number of at least 0"
std::string Expected(const KeySpec& spec, std::string_view noun) {
  const bool low = spec.min > -kTwoTo63;
  const bool high = spec.max < kTwoTo63 / 2;
  if (low && high) {
    return Concat(noun, " from ", NumberText(spec.min), " to ", NumberText(spec.max));
  }
  if (low) {
    return spec.min > 0 && spec.min < 1e-300 ? Concat(noun, " above 0")
                                             : Concat(noun, " of at least ", NumberText(spec.min));
  }
  return std::string(noun);
}

JsonValue MakeNumber(std::string text, SourcePosition at) {
  JsonValue value;
  value.kind = Kind::kNumber;
  value.text = std::move(text);
  value.at = at;
  return value;
}

// The digits of a quoted integer as Python's int() takes them, also with ".0"; nothing otherwise.
std::optional<std::string> QuotedInteger(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) {
    text.remove_prefix(1);
  }
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) {
    text.remove_suffix(1);
  }
  if (const std::size_t dot = text.find('.'); dot != std::string_view::npos) {
    const std::string_view fraction = text.substr(dot + 1);
    if (fraction.empty() || fraction.find_first_not_of('0') != std::string_view::npos) {
      return std::nullopt;
    }
    text = text.substr(0, dot);
  }
  std::string digits;
  if (!text.empty() && (text.front() == '-' || text.front() == '+')) {
    if (text.front() == '-') digits = "-";
    text.remove_prefix(1);
  }
  bool after_digit = false;
  for (const char c : text) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (!digit && !(c == '_' && after_digit)) return std::nullopt;
    if (digit) digits.push_back(c);
    after_digit = digit;
  }
  if (!after_digit) return std::nullopt;
  return digits;
}

// A number's lexeme as a 64-bit integer.
absl::StatusOr<std::int64_t> IntegerOf(const JsonValue& value, std::string_view lexeme,
                                       std::string_view expected) {
  if (lexeme.find_first_not_of("+-0123456789") == std::string_view::npos) {
    errno = 0;
    const long long parsed = std::strtoll(std::string(lexeme).c_str(), nullptr, 10);
    if (errno == ERANGE) return Mismatch(value, "a whole number below 2^63");
    return static_cast<std::int64_t>(parsed);
  }
  const double number = NumberValue(lexeme).value_or(std::nan(""));
  if (!std::isfinite(number)) return Mismatch(value, expected);
  if (std::abs(number) >= kTwoTo63) return Mismatch(value, "a whole number below 2^63");
  if (std::floor(number) != number) {
    return Mismatch(
        value, Concat(expected, ", without a fraction: write ", static_cast<std::int64_t>(number)));
  }
  return static_cast<std::int64_t>(number);
}

absl::StatusOr<NormalisedValue> NormaliseInt(const KeySpec& spec, const JsonValue& value) {
  const std::string expected = Expected(spec, "a whole number");
  const bool strict = (spec.flags & kStrict) != 0;
  NormalisedValue out;
  std::string lexeme = value.text;
  if (value.kind == Kind::kBool && !strict) {
    lexeme = value.boolean ? "1" : "0";
    out.warning = Concat(RenderJson(value), " is taken as ", lexeme);
  } else if (value.kind == Kind::kString) {
    const std::optional<std::string> digits = QuotedInteger(value.text);
    if (strict || !digits.has_value()) {
      return Mismatch(value,
                      IsNumberLexeme(value.text) ? Concat(expected, ", without quotes") : expected);
    }
    lexeme = *digits;
  } else if (value.kind != Kind::kNumber) {
    return Mismatch(value, expected);
  }
  ZS_ASSIGN_OR_RETURN(const std::int64_t number, IntegerOf(value, lexeme, expected));
  const double as_double = static_cast<double>(number);
  if (as_double < spec.min || as_double > spec.max) return Mismatch(value, expected);
  out.value = MakeNumber(Concat(number), value.at);
  return out;
}

absl::StatusOr<NormalisedValue> NormaliseFloat(const KeySpec& spec, const JsonValue& value) {
  const std::string expected = Expected(spec, "a number");
  const bool strict = (spec.flags & kStrict) != 0;
  NormalisedValue out;
  std::string lexeme = value.text;
  if (value.kind == Kind::kBool && !strict) {
    lexeme = value.boolean ? "1" : "0";
    out.warning = Concat(RenderJson(value), " is taken as ", lexeme);
  } else if (value.kind == Kind::kString && IsNumberLexeme(value.text)) {
    if (strict) return Mismatch(value, Concat(expected, ", without quotes"));
  } else if (value.kind != Kind::kNumber) {
    return Mismatch(value, expected);
  }
  const double number = NumberValue(lexeme).value_or(std::nan(""));
  if (!std::isfinite(number)) return Mismatch(value, Concat(expected, ", finite"));
  if (number < spec.min || number > spec.max) return Mismatch(value, expected);
  out.value = MakeNumber(CanonicalLexeme(lexeme), value.at);
  return out;
}

absl::StatusOr<NormalisedValue> NormaliseBool(const KeySpec& spec, const JsonValue& value) {
  NormalisedValue out;
  out.value.kind = Kind::kBool;
  out.value.at = value.at;
  if (value.kind == Kind::kBool) {
    out.value.boolean = value.boolean;
    return out;
  }
  const bool strict = (spec.flags & kStrict) != 0;
  if (value.kind == Kind::kNumber) {
    const std::optional<double> number = NumberValue(value.text);
    if (number == 0.0 || number == 1.0) {
      out.value.boolean = number == 1.0;
      return out;
    }
  }
  if (value.kind == Kind::kString && !strict) {
    for (const std::string_view word : {"true", "t", "yes", "y", "on", "1"}) {
      out.value.boolean |= absl::EqualsIgnoreCase(Abs(word), value.text);
    }
    if (out.value.boolean) return out;
    for (const std::string_view word : {"false", "f", "no", "n", "off", "0"}) {
      if (absl::EqualsIgnoreCase(Abs(word), value.text)) return out;
    }
  }
  return Mismatch(value, strict && value.kind == Kind::kString ? "true or false, without quotes"
                                                               : "true or false");
}

// "none, cpu or nvme"
std::string ChoiceList(std::string_view choices) {
  std::string out;
  for (const char c : choices) {
    if (c == '|') {
      out += ", ";
    } else {
      out.push_back(c);
    }
  }
  if (const std::size_t comma = out.rfind(", "); comma != std::string::npos) {
    out.replace(comma, 2, " or ");
  }
  return out;
}

absl::StatusOr<NormalisedValue> NormaliseText(const KeySpec& spec, const JsonValue& value) {
  NormalisedValue out;
  if (spec.choices.empty()) {
    if (value.kind != Kind::kString) return Mismatch(value, "text in quotes");
    out.value = value;
    return out;
  }
  if (value.kind != Kind::kString) return Mismatch(value, ChoiceList(spec.choices));
  std::string_view rest = spec.choices;
  while (!rest.empty()) {
    const std::string_view choice = rest.substr(0, rest.find('|'));
    if (absl::EqualsIgnoreCase(Abs(choice), value.text)) {
      out.value = value;
      out.value.text = std::string(choice);
      return out;
    }
    rest.remove_prefix(std::min(rest.size(), choice.size() + 1));
  }
  return Mismatch(value, ChoiceList(spec.choices));
}

absl::StatusOr<NormalisedValue> NormaliseList(const KeySpec& spec, const JsonValue& value) {
  NormalisedValue out;
  out.value = value;
  if (spec.type == KeyType::kTextList) {
    if (value.kind == Kind::kString) {
      out.value = JsonValue();
      out.value.kind = Kind::kArray;
      out.value.at = value.at;
      out.value.items.push_back(value);
    }
    for (const JsonValue& item : out.value.items) {
      if (item.kind != Kind::kString) return Mismatch(item, "text in quotes");
    }
    if (out.value.kind != Kind::kArray) return Mismatch(value, "a list of texts");
    return out;
  }
  const bool pair = spec.type == KeyType::kFloatPair;
  const bool whole = spec.type == KeyType::kIntList;
  const std::string_view expected = pair ? "a list of two numbers" : "a list of numbers";
  if (value.kind != Kind::kArray || value.items.empty()) return Mismatch(value, expected);
  if (pair && value.items.size() != 2) return Mismatch(value, expected);
  for (JsonValue& item : out.value.items) {
    ZS_ASSIGN_OR_RETURN(NormalisedValue one,
                        whole ? NormaliseInt(spec, item) : NormaliseFloat(spec, item));
    item = std::move(one.value);
  }
  return out;
}

}  // namespace

absl::StatusOr<NormalisedValue> NormaliseValue(const KeySpec& spec, const JsonValue& value) {
  switch (spec.type) {
    case KeyType::kBool:
      return NormaliseBool(spec, value);
    case KeyType::kInt:
      return NormaliseInt(spec, value);
    case KeyType::kFloat:
      return NormaliseFloat(spec, value);
    case KeyType::kText:
      return NormaliseText(spec, value);
    case KeyType::kTextList:
    case KeyType::kIntList:
    case KeyType::kFloatPair:
      return NormaliseList(spec, value);
    case KeyType::kFloatOrList:
      if (value.kind == Kind::kArray) return NormaliseList(spec, value);
      return NormaliseFloat(spec, value);
    case KeyType::kNumberish:
      return NormalisedValue{.value = value, .warning = ""};
    case KeyType::kBlock:
      break;
  }
  if (!value.is_object()) return Mismatch(value, "a block in braces");
  return NormalisedValue{.value = value, .warning = ""};
}

JsonValue DefaultValue(const KeySpec& spec) {
  absl::StatusOr<JsonValue> value = ParseHjson(spec.default_value);
  if (!value.ok()) return JsonValue();
  value->at = SourcePosition();
  return *std::move(value);
}

}  // namespace zeroshard
