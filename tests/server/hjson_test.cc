#include "server/hjson.h"

#include <cmath>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/hjson_text.h"

namespace zeroshard {
namespace {

std::string Rendered(std::string_view text) {
  const absl::StatusOr<JsonValue> value = ParseHjson(text);
  return value.ok() ? RenderJson(*value) : std::string(value.status().message());
}

struct Case {
  std::string_view text;
  std::string_view rendered;  // strict JSON, or the error
};

TEST(Hjson, ReadsWhatPeopleWrite) {
  const Case cases[] = {
      {"{}", "{}"},
      {"[]", "[]"},
      {" null ", "null"},
      {"{\"a\": 1}", "{\"a\": 1}"},
      {"{a: 1, b.c-d_$: 'x'}", "{\"a\": 1, \"b.c-d_$\": \"x\"}"},
      {"{'a': 1,}", "{\"a\": 1}"},
      {"[1, 2,]", "[1, 2]"},
      {"# head\n{ // here\n \"a\": /* in */ 1 # tail\n}\n// end", "{\"a\": 1}"},
      {"{\"a\": 1\n\"b\": 2}", "{\"a\": 1, \"b\": 2}"},
      {"[1\n2 # two\n3]", "[1, 2, 3]"},
      {"\xEF\xBB\xBF{}", "{}"},
      {"{\r\n \"a\": true,\r\n \"b\": false }\r\n", "{\"a\": true, \"b\": false}"},
      {"\"http://x#y\"", "\"http://x#y\""},
      {"'it\\'s \\\"q\\\" \\u00e9 \\ud83d\\ude00'", "\"it's \\\"q\\\" \xC3\xA9 \xF0\x9F\x98\x80\""},
      {"\"\\n\\t\\\\\"", "\"\\u000a\\u0009\\\\\""},
  };
  for (const Case& c : cases) EXPECT_EQ(Rendered(c.text), c.rendered) << c.text;
}

TEST(Hjson, KeepsTheDigitsOfNumbersAndWritesThemStrictly) {
  const Case cases[] = {
      {"5e8", "5e8"},
      {"500000000.0", "500000000.0"},
      {"-0.5E-3", "-0.5E-3"},
      {"+7", "7"},
      {".5", "0.5"},
      {"5.", "5"},
      {"-.5e+2", "-0.5e+2"},
      {"007", "7"},
      {"-00", "-0"},
      {"Infinity", "Infinity"},
      {"-Infinity", "-Infinity"},
      {"NaN", "NaN"},
      {"123456789012345678901234567890", "123456789012345678901234567890"},
  };
  for (const Case& c : cases) EXPECT_EQ(Rendered(c.text), c.rendered) << c.text;
}

TEST(Hjson, SaysWhereAndWhat) {
  const Case cases[] = {
      {"", "1:1: expected a value, found the end of the text"},
      {"{", "1:2: expected a key, found the end of the text"},
      {"{\n  \"a\" 1}", "2:7: expected ':' after the key, found '1'"},
      {"{\"a\": 1 \"b\": 2}", "1:9: expected ',' or '}', found '\"'"},
      {"{\"a\": [1, 2}", "1:12: expected ',' or ']', found '}'"},
      {"{\"a\": AdamW}", "1:7: text must be in quotes: write \"AdamW\""},
      {"{\"a\": 1e}", "1:7: text must be in quotes: write \"1e\""},
      {"{} {}", "1:4: expected the end of the text, found '{'"},
      {"\"abc", "1:1: this text has no closing quote"},
      {"\"abc\ndef\"", "1:1: this text has no closing quote"},
      {"'''abc'''", "1:1: multi-line text (''') is not taken: write it in one pair of quotes"},
      {"/* open", "1:1: this comment has no closing */"},
      {"\"\\x\"", "1:2: unknown escape in text"},
      {"\"\\u12\"", "1:2: \\u needs four hexadecimal digits"},
      {"\"\\ud800\"", "1:2: half of a surrogate pair in text"},
      {"\"\\u0000\"", "1:2: \\u0000 is not taken in text"},
      {"\"a\x01\"", "1:3: control character in text: byte 0x01"},
      {"{,}", "1:2: expected a key, found ','"},
      {"[,]", "1:2: expected a value, found ','"},
      {"[1,,2]", "1:4: expected a value, found ','"},
  };
  for (const Case& c : cases) EXPECT_EQ(Rendered(c.text), c.rendered) << c.text;
  EXPECT_EQ(Rendered("{\n \"a\": \"\xFF\"}"), "2:8: this is not UTF-8 text");
  EXPECT_EQ(Rendered("\xED\xA0\x80"), "1:1: this is not UTF-8 text");
}

TEST(Hjson, NamesBothPlacesOfADuplicateKey) {
  EXPECT_EQ(Rendered("{\"a\": 1,\n \"b\": 2,\n a: 3, 'b': 4}"),
            "1:1: duplicate keys in the block that starts here: \"a\" (1:2 and 3:2), "
            "\"b\" (2:2 and 3:8)");
  EXPECT_EQ(Rendered("{x: {a: 1}, y: {a: 2}}"), "{\"x\": {\"a\": 1}, \"y\": {\"a\": 2}}");
  std::string many = "{";
  for (int i = 0; i < 100; ++i) absl::StrAppend(&many, "a: 1\n");
  EXPECT_TRUE(absl::StrContains(Rendered(many + "}"), "duplicate keys"));
}

TEST(Hjson, IsBoundedInDepthSizeAndKeys) {
  const std::string deep = std::string(31, '[') + "1" + std::string(31, ']');
  EXPECT_EQ(Rendered(deep), deep);
  EXPECT_EQ(Rendered(std::string(100000, '[')), "1:33: more than 32 nested blocks");
  EXPECT_TRUE(absl::StrContains(Rendered(std::string(kMaxHjsonBytes + 1, ' ')), "at most"));
  std::string many = "{";
  for (int i = 0; i < 2000; ++i) absl::StrAppend(&many, "k", i, ": 1\n");
  EXPECT_TRUE(absl::StrContains(Rendered(many + "}"), "more than 1024 keys"));
}

TEST(Hjson, RemembersWhereValuesStood) {
  const absl::StatusOr<JsonValue> value = ParseHjson("{\n  a: 1,\n  b: [\n    2]}");
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(PositionText(value->members[0].at), "2:3");
  EXPECT_EQ(PositionText(value->Find("a")->at), "2:6");
  EXPECT_EQ(PositionText(value->Find("b")->items[0].at), "4:5");
  EXPECT_EQ(value->Find("c"), nullptr);
  EXPECT_EQ(PositionText({}), "");
}

TEST(Hjson, RenderedTextReadsBackTheSame) {
  const std::string text = "{a: [1, -2.5e3, 'q\\u0007\"', null, true, {b: {}}], c: Infinity}";
  const absl::StatusOr<JsonValue> value = ParseHjson(text);
  ASSERT_TRUE(value.ok());
  const absl::StatusOr<JsonValue> again = ParseHjson(RenderJson(*value));
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(SameJson(*value, *again));
}

TEST(Hjson, ComparesNumbersByValueAndObjectsInAnyOrder) {
  const auto same = [](std::string_view a, std::string_view b) {
    return SameJson(*ParseHjson(a), *ParseHjson(b));
  };
  EXPECT_TRUE(same("5e8", "500000000"));
  EXPECT_TRUE(same("{a: 1, b: 2.0}", "{b: 2, a: 1}"));
  EXPECT_FALSE(same("1", "\"1\""));
  EXPECT_FALSE(same("[1]", "[1, 2]"));
  EXPECT_FALSE(same("{a: 1}", "{b: 1}"));
}

TEST(HjsonText, NumbersOverflowToInfinity) {
  EXPECT_EQ(NumberValue("1e400"), HUGE_VAL);
  EXPECT_EQ(NumberValue("-1e400"), -HUGE_VAL);
  EXPECT_EQ(NumberValue("1e-400"), 0.0);
  EXPECT_TRUE(std::isnan(*NumberValue("NaN")));
  EXPECT_EQ(NumberValue("0x10"), std::nullopt);
  EXPECT_EQ(NumberValue("-"), std::nullopt);
  EXPECT_EQ(NumberValue("."), std::nullopt);
}

}  // namespace
}  // namespace zeroshard
