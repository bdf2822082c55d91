#ifndef ZEROSHARD_SERVER_HJSON_H_
#define ZEROSHARD_SERVER_HJSON_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

// A reader for the JSON that people write by hand, and a small value tree that remembers where
// everything stood. It takes strict JSON and, of Hjson, what configuration files use:
//
//   comments            # to the end of the line, // to the end of the line, /* ... */
//   commas              a trailing comma; a line break in place of a comma
//   keys                unquoted: letters, digits, '_', '-', '.', '$', '@', '+'
//   strings             "double" or 'single' quotes, JSON's escapes in both
//   numbers             JSON's, also "+1", ".5", "5."; the bare words NaN, Infinity, -Infinity
//
// Hjson's unquoted and multi-line strings are refused on purpose: an unquoted string runs to the
// end of its line, swallows the comma and the comment behind it, and a typo becomes a value.
//
// Every error is InvalidArgument and begins with "LINE:COLUMN: " (both from 1; columns count
// bytes). A duplicate key is an error that names both places. The input may be any bytes: it is
// bounded in size (kMaxHjsonBytes) and depth (kMaxHjsonDepth) and checked to be UTF-8.
// Plain functions without state; any thread may call them.

namespace zeroshard {

inline constexpr std::size_t kMaxHjsonBytes = std::size_t{1} << 20;
inline constexpr int kMaxHjsonDepth = 32;

// Where a value or key begins. Line 0 means that it came from no file.
struct SourcePosition {
  int line = 0;
  int column = 0;
};

// "3:14", or "" when there is no position.
std::string PositionText(SourcePosition position);

struct JsonMember;

// One value. `text` holds a string's characters (UTF-8), or a number as strict
// JSON writes it, with the digits of the file.
struct JsonValue {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  std::string text;
  std::vector<JsonValue> items;
  std::vector<JsonMember> members;
  SourcePosition at;

  bool is_object() const { return kind == Kind::kObject; }
  bool is_string(std::string_view value) const { return kind == Kind::kString && text == value; }

  // The member of that name, or null. Valid until the object changes.
  const JsonValue* Find(std::string_view name) const;
  JsonValue* Find(std::string_view name);
};

struct JsonMember {
  std::string name;
  SourcePosition at;
  JsonValue value;
};

// Reads one value of any kind that fills the whole text.
absl::StatusOr<JsonValue> ParseHjson(std::string_view text);

// The value as one line of strict JSON, members in their order. Numbers keep their lexeme, so
// NaN and Infinity stay what they were.
std::string RenderJson(const JsonValue& value);

// `text` as a JSON string with its quotes.
std::string JsonQuote(std::string_view text);

// The same value, positions apart; numbers are compared by value (5e8 equals 500000000).
bool SameJson(const JsonValue& a, const JsonValue& b);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_HJSON_H_
