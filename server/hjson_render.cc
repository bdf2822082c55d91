#include <cstddef>

#include "server/hjson.h"
#include "server/hjson_text.h"
#include "server/text.h"

namespace zeroshard {
namespace {

using Kind = JsonValue::Kind;

void Append(const JsonValue& value, std::string& out) {
  switch (value.kind) {
    case Kind::kNull:
      out.append("null");
      return;
    case Kind::kBool:
      out.append(value.boolean ? "true" : "false");
      return;
    case Kind::kNumber:
      out.append(value.text);
      return;
    case Kind::kString:
      out.append(JsonQuote(value.text));
      return;
    case Kind::kArray:
      out.push_back('[');
      for (const JsonValue& item : value.items) {
        if (&item != &value.items.front()) out.append(", ");
        Append(item, out);
      }
      out.push_back(']');
      return;
    case Kind::kObject:
      out.push_back('{');
      for (const JsonMember& member : value.members) {
        if (&member != &value.members.front()) out.append(", ");
        out.append(Concat(JsonQuote(member.name), ": "));
        Append(member.value, out);
      }
      out.push_back('}');
      return;
  }
}

}  // namespace

std::string RenderJson(const JsonValue& value) {
  std::string out;
  Append(value, out);
  return out;
}

std::string JsonQuote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out.append(Concat("\\u", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad4)));
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

bool SameJson(const JsonValue& a, const JsonValue& b) {
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case Kind::kNull:
      return true;
    case Kind::kBool:
      return a.boolean == b.boolean;
    case Kind::kNumber:
      return a.text == b.text || NumberValue(a.text) == NumberValue(b.text);
    case Kind::kString:
      return a.text == b.text;
    case Kind::kArray:
      if (a.items.size() != b.items.size()) return false;
      for (std::size_t i = 0; i < a.items.size(); ++i) {
        if (!SameJson(a.items[i], b.items[i])) return false;
      }
      return true;
    case Kind::kObject:
      if (a.members.size() != b.members.size()) return false;
      for (const JsonMember& member : a.members) {
        const JsonValue* other = b.Find(member.name);
        if (other == nullptr || !SameJson(member.value, *other)) return false;
      }
      return true;
  }
  return false;
}

}  // namespace zeroshard
