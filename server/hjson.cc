#include "server/hjson.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "server/hjson_text.h"
#include "server/text.h"

namespace zeroshard {
namespace {

using Kind = JsonValue::Kind;

bool IsKeyByte(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         (c != '\0' && std::string_view("_-.$@+").find(c) != std::string_view::npos);
}

// A recursive-descent parser. The first error ends it; depth is bounded, so the stack is too.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  absl::StatusOr<JsonValue> Run() {
    absl::StatusOr<JsonValue> value = ParseValue(0);
    if (!value.ok()) return value;
    absl::Status status = SkipBlank();
    if (!status.ok()) return status;
    if (!AtEnd()) return Error(Concat("expected the end of the text, found ", Here()));
    return value;
  }

 private:
  bool AtEnd() const { return next_ >= text_.size(); }
  char Peek(std::size_t ahead = 0) const {
    return next_ + ahead < text_.size() ? text_[next_ + ahead] : '\0';
  }
  SourcePosition Position() const { return {line_, static_cast<int>(next_ - line_start_) + 1}; }

  void Advance() {
    if (text_[next_] == '\n') {
      ++line_;
      line_start_ = next_ + 1;
    }
    ++next_;
  }

  // What stands at the current place, for an error message.
  std::string Here() const {
    if (AtEnd()) return "the end of the text";
    const char c = Peek();
    if (std::isprint(static_cast<unsigned char>(c)) == 0) {
      return Concat("byte 0x", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
    return Concat("'", std::string(1, c), "'");
  }

  absl::Status Error(std::string_view what) const { return ErrorAt(Position(), what); }
  static absl::Status ErrorAt(SourcePosition at, std::string_view what) {
    return absl::InvalidArgumentError(Concat(PositionText(at), ": ", what));
  }

  absl::Status SkipBlank();
  absl::Status SkipBlockComment();
  absl::StatusOr<JsonValue> ParseValue(int depth);
  absl::StatusOr<JsonValue> ParseObject(int depth);
  absl::StatusOr<JsonValue> ParseArray(int depth);
  absl::StatusOr<JsonValue> ParseWord();
  absl::StatusOr<std::string> ParseString();
  absl::StatusOr<std::string> ParseKey();
  absl::StatusOr<bool> EndsAfterSeparator(char close);

  std::string_view text_;
  std::size_t next_ = 0;
  std::size_t line_start_ = 0;
  int line_ = 1;
};

absl::Status Parser::SkipBlockComment() {
  const SourcePosition begin = Position();
  Advance();
  Advance();
  while (!AtEnd() && !(Peek() == '*' && Peek(1) == '/')) Advance();
  if (AtEnd()) return ErrorAt(begin, "this comment has no closing */");
  Advance();
  Advance();
  return absl::OkStatus();
}

absl::Status Parser::SkipBlank() {
  while (!AtEnd()) {
    const char c = Peek();
    if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
      Advance();
    } else if (c == '#' || (c == '/' && Peek(1) == '/')) {
      while (!AtEnd() && Peek() != '\n') Advance();
    } else if (c == '/' && Peek(1) == '*') {
      if (absl::Status status = SkipBlockComment(); !status.ok()) return status;
    } else {
      break;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<JsonValue> Parser::ParseValue(int depth) {
  if (absl::Status status = SkipBlank(); !status.ok()) return status;
  if (AtEnd()) return Error("expected a value, found the end of the text");
  if (depth >= kMaxHjsonDepth) {
    return Error(Concat("more than ", kMaxHjsonDepth, " nested blocks"));
  }
  const char c = Peek();
  if (c == '{') return ParseObject(depth);
  if (c == '[') return ParseArray(depth);
  if (c != '"' && c != '\'') return ParseWord();
  JsonValue value;
  value.kind = Kind::kString;
  value.at = Position();
  absl::StatusOr<std::string> text = ParseString();
  if (!text.ok()) return text.status();
  value.text = *std::move(text);
  return value;
}

// Between two items: a comma, a line break, or the closing bracket. True at the bracket (taken).
absl::StatusOr<bool> Parser::EndsAfterSeparator(char close) {
  const int line = line_;
  if (absl::Status status = SkipBlank(); !status.ok()) return status;
  bool separated = line_ != line;
  if (Peek() == ',') {
    separated = true;
    Advance();
    if (absl::Status status = SkipBlank(); !status.ok()) return status;
  }
  if (Peek() == close) {
    Advance();
    return true;
  }
  if (!separated || AtEnd()) {
    return Error(Concat("expected ',' or '", std::string(1, close), "', found ", Here()));
  }
  return false;
}

absl::StatusOr<JsonValue> Parser::ParseObject(int depth) {
  JsonValue object;
  object.kind = Kind::kObject;
  object.at = Position();
  Advance();
  if (absl::Status status = SkipBlank(); !status.ok()) return status;
  if (Peek() == '}') {
    Advance();
    return object;
  }
  std::vector<std::string> duplicates;
  while (true) {
    JsonMember member;
    member.at = Position();
    absl::StatusOr<std::string> name = ParseKey();
    if (!name.ok()) return name.status();
    member.name = *std::move(name);
    if (absl::Status status = SkipBlank(); !status.ok()) return status;
    if (Peek() != ':') return Error(Concat("expected ':' after the key, found ", Here()));
    Advance();
    absl::StatusOr<JsonValue> value = ParseValue(depth + 1);
    if (!value.ok()) return value;
    member.value = *std::move(value);
    for (const JsonMember& earlier : object.members) {
      if (earlier.name != member.name) continue;
      duplicates.push_back(Concat(JsonQuote(member.name), " (", PositionText(earlier.at), " and ",
                                  PositionText(member.at), ")"));
      break;
    }
    // A key repeated thousands of times must not make the check above quadratic.
    if (duplicates.size() > 8) break;
    object.members.push_back(std::move(member));
    if (object.members.size() > kMaxMembers) {
      return Error(Concat("more than ", kMaxMembers, " keys in one block"));
    }
    absl::StatusOr<bool> ended = EndsAfterSeparator('}');
    if (!ended.ok()) return ended.status();
    if (*ended) break;
  }
  if (!duplicates.empty()) {
    return ErrorAt(object.at, Concat("duplicate keys in the block that starts here: ",
                                     absl::StrJoin(duplicates, ", ")));
  }
  return object;
}

absl::StatusOr<JsonValue> Parser::ParseArray(int depth) {
  JsonValue array;
  array.kind = Kind::kArray;
  array.at = Position();
  Advance();
  if (absl::Status status = SkipBlank(); !status.ok()) return status;
  if (Peek() == ']') {
    Advance();
    return array;
  }
  while (true) {
    absl::StatusOr<JsonValue> item = ParseValue(depth + 1);
    if (!item.ok()) return item;
    array.items.push_back(*std::move(item));
    absl::StatusOr<bool> ended = EndsAfterSeparator(']');
    if (!ended.ok()) return ended.status();
    if (*ended) return array;
  }
}

// A number, true, false, null, NaN or Infinity.
absl::StatusOr<JsonValue> Parser::ParseWord() {
  JsonValue value;
  value.at = Position();
  const std::size_t begin = next_;
  while (IsKeyByte(Peek())) Advance();
  const std::string_view word = text_.substr(begin, next_ - begin);
  if (word.empty()) return Error(Concat("expected a value, found ", Here()));
  if (word == "null") return value;
  if (word == "true" || word == "false") {
    value.kind = Kind::kBool;
    value.boolean = word == "true";
    return value;
  }
  if (IsNumberLexeme(word)) {
    value.kind = Kind::kNumber;
    value.text = CanonicalLexeme(word);
    return value;
  }
  return ErrorAt(value.at, Concat("text must be in quotes: write \"", word, "\""));
}

absl::StatusOr<std::string> Parser::ParseKey() {
  if (Peek() == '"' || Peek() == '\'') return ParseString();
  const std::size_t begin = next_;
  while (IsKeyByte(Peek())) Advance();
  if (next_ == begin) return Error(Concat("expected a key, found ", Here()));
  return std::string(text_.substr(begin, next_ - begin));
}

absl::StatusOr<std::string> Parser::ParseString() {
  const SourcePosition begin = Position();
  const char quote = Peek();
  if (quote == '\'' && Peek(1) == '\'' && Peek(2) == '\'') {
    return Error("multi-line text (''') is not taken: write it in one pair of quotes");
  }
  Advance();
  std::string text;
  while (true) {
    if (AtEnd() || Peek() == '\n') return ErrorAt(begin, "this text has no closing quote");
    const char c = Peek();
    if (c == quote) {
      Advance();
      return text;
    }
    if (static_cast<unsigned char>(c) < 0x20 && c != '\t') {
      return Error(Concat("control character in text: ", Here()));
    }
    if (c != '\\') {
      text.push_back(c);
      Advance();
      continue;
    }
    absl::StatusOr<Escape> escape = DecodeEscape(text_.substr(next_));
    if (!escape.ok()) return Error(Std(escape.status().message()));
    text.append(escape->text);
    for (std::size_t i = 0; i < escape->consumed; ++i) Advance();
  }
}

}  // namespace

std::string PositionText(SourcePosition position) {
  if (position.line == 0) return "";
  return Concat(position.line, ":", position.column);
}

const JsonValue* JsonValue::Find(std::string_view name) const {
  for (const JsonMember& member : members) {
    if (member.name == name) return &member.value;
  }
  return nullptr;
}

JsonValue* JsonValue::Find(std::string_view name) {
  return const_cast<JsonValue*>(std::as_const(*this).Find(name));
}

absl::StatusOr<JsonValue> ParseHjson(std::string_view text) {
  if (text.size() > kMaxHjsonBytes) {
    return absl::InvalidArgumentError(
        Concat("1:1: ", text.size(), " bytes; at most ", kMaxHjsonBytes, " are read"));
  }
  if (text.substr(0, 3) == "\xEF\xBB\xBF") text.remove_prefix(3);
  if (const std::size_t bad = FindInvalidUtf8(text); bad != std::string_view::npos) {
    const std::string_view before = text.substr(0, bad);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const std::size_t newline = before.rfind('\n');
    const std::size_t column = newline == std::string_view::npos ? bad + 1 : bad - newline;
    return absl::InvalidArgumentError(Concat(line, ":", column, ": this is not UTF-8 text"));
  }
  return Parser(text).Run();
}

}  // namespace zeroshard
