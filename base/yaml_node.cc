// YamlNode over yaml-cpp. Its exceptions end in this file.

#include <exception>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/config.h"
#include "base/status.h"
#include "base/strings.h"
#include "yaml-cpp/eventhandler.h"
#include "yaml-cpp/yaml.h"

namespace zeroshard {
namespace {

// Whether "5" in quotes is as good as 5.
enum class Quotes { kAllowed, kRefused };

}  // namespace

struct YamlNode::Impl {
  std::string source;
  std::string path;  // of this mapping: "" at the top, else "a.b"
  YAML::Node node;   // a mapping, or null for one that is absent
  std::set<std::string> read;
  std::vector<std::shared_ptr<Impl>> children;

  std::string PathOf(std::string_view key) const {
    return path.empty() ? std::string(key) : absl::StrCat(path, ".", Abs(key));
  }

  // The value of `key`, which now counts as read; undefined where it is absent or null.
  YAML::Node Read(std::string_view key);

  // The text of a scalar, or nothing where it is absent or null.
  absl::StatusOr<std::optional<std::string>> Scalar(std::string_view key, std::string_view expected,
                                                    Quotes quotes);

  absl::Status WrongType(std::string_view key, std::string_view expected) const;
  absl::StatusOr<std::shared_ptr<Impl>> AddChild(const YAML::Node& value, std::string child_path);
  void AddUnreadKeys(std::vector<std::string>& problems) const;
};

namespace {

// Sees all parts of a document and keeps nothing.
class NullHandler final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

// YAML::LoadAll is no choice: on some malformed texts it makes documents for ever.
bool HasSecondDocument(std::string_view text) {
  std::istringstream stream{std::string(text)};
  YAML::Parser parser(stream);
  NullHandler handler;
  return parser.HandleNextDocument(handler) && parser.HandleNextDocument(handler);
}

// What a user sees of a node in "found ...".
std::string Describe(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Map:
      return "a mapping";
    case YAML::NodeType::Sequence:
      return "a list";
    case YAML::NodeType::Scalar:
      return absl::StrCat("\"", node.Scalar().substr(0, 64), "\"");
    default:
      return "nothing";
  }
}

absl::Status ErrorAt(const std::string& source, const YAML::Node& node, const std::string& path,
                     std::string_view problem) {
  const bool has_line = node.IsDefined() && node.Mark().line >= 0;
  const std::string line = has_line ? absl::StrCat(":", node.Mark().line + 1) : "";
  return absl::InvalidArgumentError(
      absl::StrCat(source, line, path.empty() ? "" : ": ", path, ": ", Abs(problem)));
}

// Keys must be distinct scalars: yaml-cpp itself would keep the first and drop the others silently.
absl::Status CheckKeys(const std::string& source, const std::string& path, const YAML::Node& node) {
  std::set<std::string> seen;
  for (const auto& entry : node) {
    if (!entry.first.IsScalar()) {
      return ErrorAt(source, entry.first, path,
                     absl::StrCat("expected a plain key, found ", Describe(entry.first)));
    }
    if (!seen.insert(entry.first.Scalar()).second) {
      return ErrorAt(source, entry.first, path,
                     absl::StrCat("the key \"", entry.first.Scalar(), "\" is given twice"));
    }
  }
  return absl::OkStatus();
}

// A missing or null value is an undefined node.
YAML::Node Find(const YAML::Node& mapping, std::string_view key) {
  if (!mapping.IsMap()) return YAML::Node(YAML::NodeType::Undefined);
  for (const auto& entry : mapping) {
    if (entry.first.Scalar() == key && !entry.second.IsNull()) return entry.second;
  }
  return YAML::Node(YAML::NodeType::Undefined);
}

}  // namespace

YAML::Node YamlNode::Impl::Read(std::string_view key) {
  read.insert(std::string(key));
  return Find(node, key);
}

absl::StatusOr<std::optional<std::string>> YamlNode::Impl::Scalar(std::string_view key,
                                                                  std::string_view expected,
                                                                  Quotes quotes) {
  const YAML::Node value = Read(key);
  if (!value.IsDefined()) return std::optional<std::string>();
  // yaml-cpp tags a quoted scalar with "!".
  if (!value.IsScalar() || (quotes == Quotes::kRefused && value.Tag() == "!")) {
    return WrongType(key, expected);
  }
  return std::optional<std::string>(value.Scalar());
}

absl::Status YamlNode::Impl::WrongType(std::string_view key, std::string_view expected) const {
  const YAML::Node value = Find(node, key);
  return ErrorAt(source, value, PathOf(key),
                 absl::StrCat("expected ", Abs(expected), ", found ", Describe(value)));
}

absl::StatusOr<std::shared_ptr<YamlNode::Impl>> YamlNode::Impl::AddChild(const YAML::Node& value,
                                                                         std::string child_path) {
  auto child = std::make_shared<Impl>();
  child->source = source;
  child->path = std::move(child_path);
  if (value.IsDefined()) child->node = value;
  ZS_RETURN_IF_ERROR(CheckKeys(source, child->path, child->node));
  children.push_back(child);
  return child;
}

void YamlNode::Impl::AddUnreadKeys(std::vector<std::string>& problems) const {
  if (node.IsMap()) {
    for (const auto& entry : node) {
      const std::string& key = entry.first.Scalar();
      if (read.contains(key)) continue;
      const absl::Status error = ErrorAt(source, entry.first, PathOf(key), "unknown key");
      problems.emplace_back(error.message());
    }
  }
  for (const std::shared_ptr<Impl>& child : children) child->AddUnreadKeys(problems);
}

absl::StatusOr<YamlNode> YamlNode::Parse(std::string_view text, std::string_view source) {
  auto impl = std::make_shared<Impl>();
  impl->source = std::string(source);
  try {
    if (HasSecondDocument(text)) {
      return absl::InvalidArgumentError(
          absl::StrCat(impl->source, ": expected one document, found several"));
    }
    impl->node = YAML::Load(std::string(text));
    if (!impl->node.IsMap() && !impl->node.IsNull()) {
      return ErrorAt(
          impl->source, impl->node, "",
          absl::StrCat("expected a mapping of keys to values, found ", Describe(impl->node)));
    }
    ZS_RETURN_IF_ERROR(CheckKeys(impl->source, "", impl->node));
  } catch (const YAML::Exception& error) {
    const std::string line = error.mark.line >= 0 ? absl::StrCat(":", error.mark.line + 1) : "";
    return absl::InvalidArgumentError(
        absl::StrCat(impl->source, line, ": not valid YAML: ", error.msg));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(impl->source, ": not valid YAML: ", error.what()));
  }
  return YamlNode(std::move(impl));
}

absl::StatusOr<YamlNode> YamlNode::ParseFile(const std::string& path) {
  ZS_ASSIGN_OR_RETURN(const std::string text, ReadConfigFile(path));
  return Parse(text, path);
}

bool YamlNode::Has(std::string_view key) const { return Find(impl_->node, key).IsDefined(); }

absl::Status YamlNode::Error(std::string_view key, std::string_view problem) const {
  const YAML::Node value = Find(impl_->node, key);
  return ErrorAt(impl_->source, value.IsDefined() ? value : impl_->node, impl_->PathOf(key),
                 problem);
}

absl::StatusOr<std::string> YamlNode::String(std::string_view key,
                                             std::string_view fallback) const {
  ZS_ASSIGN_OR_RETURN(std::optional<std::string> text,
                      impl_->Scalar(key, "a text", Quotes::kAllowed));
  return text ? *std::move(text) : std::string(fallback);
}

absl::StatusOr<std::string> YamlNode::RequiredString(std::string_view key) const {
  if (!Has(key)) return Error(key, "is required, and missing");
  return String(key, "");
}

absl::StatusOr<int64_t> YamlNode::Int(std::string_view key, int64_t fallback,
                                      IntRange range) const {
  ZS_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                      impl_->Scalar(key, "a whole number", Quotes::kRefused));
  if (!text) return fallback;
  int64_t value = 0;
  if (!absl::SimpleAtoi(*text, &value)) return impl_->WrongType(key, "a whole number");
  if (value < range.min || value > range.max) {
    return Error(key, absl::StrCat("expected a number from ", range.min, " to ", range.max,
                                   ", found ", value));
  }
  return value;
}

absl::StatusOr<double> YamlNode::Double(std::string_view key, double fallback) const {
  ZS_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                      impl_->Scalar(key, "a number", Quotes::kRefused));
  if (!text) return fallback;
  double value = 0;
  if (!absl::SimpleAtod(*text, &value)) return impl_->WrongType(key, "a number");
  return value;
}

absl::StatusOr<bool> YamlNode::Bool(std::string_view key, bool fallback) const {
  ZS_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                      impl_->Scalar(key, "true or false", Quotes::kRefused));
  if (!text) return fallback;
  if (*text == "true" || *text == "True") return true;
  if (*text == "false" || *text == "False") return false;
  return impl_->WrongType(key, "true or false");
}

absl::StatusOr<uint64_t> YamlNode::Bytes(std::string_view key, uint64_t fallback) const {
  ZS_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                      impl_->Scalar(key, "a size such as 4GiB", Quotes::kAllowed));
  if (!text) return fallback;
  const absl::StatusOr<uint64_t> bytes = ParseByteSize(*text);
  if (!bytes.ok()) return impl_->WrongType(key, "a size such as 4GiB");
  return *bytes;
}

absl::StatusOr<absl::Duration> YamlNode::Duration(std::string_view key,
                                                  absl::Duration fallback) const {
  ZS_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                      impl_->Scalar(key, "a duration such as 1m30s", Quotes::kAllowed));
  if (!text) return fallback;
  absl::Duration value;
  if (!absl::ParseDuration(*text, &value) || value < absl::ZeroDuration()) {
    return impl_->WrongType(key, "a duration such as 1m30s");
  }
  return value;
}

absl::StatusOr<std::vector<std::string>> YamlNode::Strings(std::string_view key) const {
  const YAML::Node list = impl_->Read(key);
  std::vector<std::string> values;
  if (!list.IsDefined()) return values;
  if (!list.IsSequence()) return impl_->WrongType(key, "a list");
  for (const YAML::Node& item : list) {
    if (!item.IsScalar()) {
      return ErrorAt(impl_->source, item, impl_->PathOf(key),
                     absl::StrCat("expected a list of texts, found ", Describe(item)));
    }
    values.push_back(item.Scalar());
  }
  return values;
}

absl::StatusOr<YamlNode> YamlNode::Child(std::string_view key) const {
  const YAML::Node value = impl_->Read(key);
  if (value.IsDefined() && !value.IsMap()) return impl_->WrongType(key, "a mapping");
  ZS_ASSIGN_OR_RETURN(std::shared_ptr<Impl> child, impl_->AddChild(value, impl_->PathOf(key)));
  return YamlNode(std::move(child));
}

absl::StatusOr<std::vector<YamlNode>> YamlNode::Children(std::string_view key,
                                                         std::string_view shorthand) const {
  const YAML::Node list = impl_->Read(key);
  std::vector<YamlNode> children;
  if (!list.IsDefined()) return children;
  if (!list.IsSequence()) return impl_->WrongType(key, "a list of mappings");
  for (const YAML::Node& item : list) {
    const std::string path = absl::StrCat(impl_->PathOf(key), "[", children.size(), "]");
    const bool is_short = item.IsScalar() && !shorthand.empty();
    if (!item.IsMap() && !is_short) {
      return ErrorAt(impl_->source, item, path,
                     absl::StrCat("expected a mapping", shorthand.empty() ? "" : " or a text",
                                  ", found ", Describe(item)));
    }
    // Assigning to a YAML::Node changes the node it refers to.
    YAML::Node mapping;
    if (is_short) mapping[std::string(shorthand)] = item;
    ZS_ASSIGN_OR_RETURN(std::shared_ptr<Impl> child,
                        impl_->AddChild(is_short ? mapping : item, path));
    children.push_back(YamlNode(std::move(child)));
  }
  return children;
}

std::vector<std::string> YamlNode::Keys() const {
  std::vector<std::string> keys;
  if (!impl_->node.IsMap()) return keys;
  for (const auto& entry : impl_->node) keys.push_back(entry.first.Scalar());
  return keys;
}

absl::Status YamlNode::Finish() const {
  std::vector<std::string> problems;
  impl_->AddUnreadKeys(problems);
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "; "));
}

}  // namespace zeroshard
