#include "server/ds_config_keys.h"

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/ds_config.h"
#include "tests/server/ds_config_rows.h"

namespace zeroshard {
namespace {

// {"a": {"b": VALUE}} for "a.b", with what the key needs beside it.
std::string Document(const DeepSpeedRow& row, std::string_view value) {
  std::string path(row.path);
  std::string out;
  int depth = 0;
  std::size_t begin = 0;
  while (true) {
    const std::size_t dot = path.find('.', begin);
    absl::StrAppend(&out, "{");
    if (depth == 0 && !row.beside.empty()) absl::StrAppend(&out, std::string(row.beside), ", ");
    if (depth == 1 && !row.sibling.empty()) absl::StrAppend(&out, std::string(row.sibling), ", ");
    if (dot == std::string::npos && !row.within.empty()) {
      absl::StrAppend(&out, std::string(row.within), ", ");
    }
    ++depth;
    absl::StrAppend(&out, "\"", path.substr(begin, dot - begin), "\": ");
    if (dot == std::string::npos) break;
    begin = dot + 1;
  }
  return absl::StrCat(out, std::string(value), std::string(depth, '}'));
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

bool Mentions(const std::vector<std::string>& sentences, std::string_view path) {
  for (const std::string& sentence : sentences) {
    if (absl::StrContains(sentence, std::string(path))) return true;
  }
  return false;
}

class EveryKeyOfDeepSpeed : public testing::TestWithParam<DeepSpeedRow> {};

TEST_P(EveryKeyOfDeepSpeed, HasTheDefaultOfDeepSpeedOrOneThatIsKnownToDiffer) {
  const DeepSpeedRow& row = GetParam();
  const KeySpec* spec = FindKey(row.path);
  if (spec == nullptr) {
    for (const auto variants : {OptimizerVariants(), SchedulerVariants()}) {
      for (const VariantSpec& variant : variants) {
        if (!absl::StrContains(std::string(row.sibling),
                               absl::StrCat("\"", std::string(variant.type), "\""))) {
          continue;
        }
        for (const KeySpec& param : variant.params) {
          if (param.path == row.path) spec = &param;
        }
      }
    }
  }
  ASSERT_NE(spec, nullptr) << "no row for " << row.path;
  if (spec->status == KeyStatus::kAlias) return;  // the target has the default
  EXPECT_EQ(spec->default_value, row.default_here.empty() ? row.default_value : row.default_here);
}

TEST_P(EveryKeyOfDeepSpeed, TakesItsDefault) {
  const DeepSpeedRow& row = GetParam();
  if (row.default_value.empty() || row.fate == Fate::kRefusedBlock) return;
  const absl::StatusOr<DsConfig> config = ParseDsConfig(Document(row, row.default_value));
  EXPECT_TRUE(config.ok()) << Message(config.status());
}

// The key that an error or a resolved value may name: an alias stands for its target.
std::string NamedKey(const DeepSpeedRow& row) {
  if (row.fate == Fate::kRefusedBlock) return std::string(ParentPath(row.path));
  const KeySpec* spec = FindKey(row.path);
  const bool alias = spec != nullptr && spec->status == KeyStatus::kAlias;
  return std::string(alias ? spec->target : row.path);
}

bool IsFromFile(const DsConfig& config, const std::string& path, ValueOrigin origin) {
  for (const ResolvedValue& value : config.resolved) {
    if (absl::StartsWith(value.path, path) && value.origin == origin) return true;
  }
  return false;
}

TEST_P(EveryKeyOfDeepSpeed, IsHonouredRefusedOrNamedAsIdle) {
  const DeepSpeedRow& row = GetParam();
  const absl::StatusOr<DsConfig> config = ParseDsConfig(Document(row, row.other));
  if (row.fate == Fate::kRefused || row.fate == Fate::kRefusedBlock) {
    ASSERT_FALSE(config.ok()) << Document(row, row.other);
    EXPECT_TRUE(absl::StrContains(Message(config.status()), NamedKey(row)))
        << Message(config.status());
    return;
  }
  ASSERT_TRUE(config.ok()) << Message(config.status());
  const bool warns = row.fate == Fate::kNoEffect || row.fate == Fate::kDeprecated;
  if (row.fate != Fate::kAlias) {
    EXPECT_EQ(Mentions(config->warnings, row.path), warns)
        << testing::PrintToString(config->warnings);
  }
  const KeySpec* spec = FindKey(row.path);
  if (spec != nullptr && spec->type == KeyType::kBlock) return;
  const bool alias = row.fate == Fate::kAlias || row.fate == Fate::kDeprecated;
  EXPECT_TRUE(IsFromFile(*config, NamedKey(row), alias ? ValueOrigin::kAlias : ValueOrigin::kFile));
}

TEST_P(EveryKeyOfDeepSpeed, RefusesABadValueByName) {
  const DeepSpeedRow& row = GetParam();
  if (row.bad.empty()) return;
  const absl::StatusOr<DsConfig> config = ParseDsConfig(Document(row, row.bad));
  ASSERT_FALSE(config.ok()) << Document(row, row.bad);
  const std::string message = Message(config.status());
  EXPECT_TRUE(absl::StrContains(message, NamedKey(row)) ||
              absl::StrContains(message, std::string(row.path)))
      << message;
}

std::string RowName(const testing::TestParamInfo<DeepSpeedRow>& info) {
  std::string name = absl::StrCat(info.index, "_", std::string(info.param.path));
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Rows, EveryKeyOfDeepSpeed, testing::ValuesIn(DeepSpeedRows()), RowName);

TEST(KeyTable, HasNoPathTwiceAndEveryAliasHasATarget) {
  std::set<std::string_view> paths;
  for (const KeySpec* spec : AllKeys()) {
    EXPECT_TRUE(paths.insert(spec->path).second) << spec->path;
    if (spec->status == KeyStatus::kAlias) {
      EXPECT_NE(FindKey(spec->target), nullptr) << spec->path;
    }
    if (spec->status == KeyStatus::kNoEffect || spec->status == KeyStatus::kRefused) {
      EXPECT_TRUE(!spec->note.empty() || spec->type == KeyType::kBlock) << spec->path;
    }
    const std::string_view parent = ParentPath(spec->path);
    if (!parent.empty()) {
      ASSERT_NE(FindKey(parent), nullptr) << spec->path;
      EXPECT_EQ(FindKey(parent)->type, KeyType::kBlock) << spec->path;
    }
  }
}

TEST(KeyTable, EveryKeyIsInTheTestRowsToo) {
  std::set<std::string_view> tested;
  for (const DeepSpeedRow& row : DeepSpeedRows()) tested.insert(row.path);
  for (const KeySpec* spec : AllKeys()) {
    if (spec->type == KeyType::kBlock && spec->unknown != UnknownKeys::kOpaque) continue;
    if (absl::StartsWith(std::string(spec->path), "zeroshard.")) continue;
    if (spec->path == "bfloat16" || spec->path == "amp") continue;
    if (LeafName(spec->path) == "params") continue;
    EXPECT_TRUE(tested.contains(spec->path)) << spec->path;
  }
}

TEST(KeyTable, DocumentationHasTheTablesAsTheyAre) {
  std::ifstream file("docs/ds_config.md");
  ASSERT_TRUE(file.good());
  std::stringstream text;
  text << file.rdbuf();
  const std::string page = text.str();
  const std::string marker = "<!-- tables -->\n\n";
  const std::size_t begin = page.find(marker);
  ASSERT_NE(begin, std::string::npos);
  EXPECT_EQ(page.substr(begin + marker.size()), RenderKeyTables())
      << "write the output of //server:ds_config_tables below the marker";
}

TEST(KeyTable, DistanceCountsInsertionsChangesAndSwaps) {
  EXPECT_EQ(EditDistance("stage", "stage"), 0);
  EXPECT_EQ(EditDistance("stge", "stage"), 1);
  EXPECT_EQ(EditDistance("satge", "stage"), 1);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
}

TEST(KeyTable, AdviceNamesTheKeyMeantOrItsBlock) {
  EXPECT_EQ(AdviceForUnknownKey("zero_optimization.stge"), "did you mean stage?");
  EXPECT_EQ(AdviceForUnknownKey("zero_optimization.Stage"), "did you mean stage?");
  EXPECT_EQ(AdviceForUnknownKey("zero_optimization.aio"), "it belongs to the top level");
  EXPECT_EQ(AdviceForUnknownKey("reduce_bucket_size"), "it belongs to the block zero_optimization");
  EXPECT_EQ(AdviceForUnknownKey("gradient_cliping"), "did you mean gradient_clipping?");
  EXPECT_EQ(AdviceForUnknownKey("my_own_settings"), "");
  EXPECT_EQ(AdviceForUnknownKey(std::string(100000, 'x')), "");
}

}  // namespace
}  // namespace zeroshard
