#include "server/ds_config_settings.h"

#include <algorithm>
#include <cstdlib>

#include "server/hjson_text.h"
#include "server/text.h"

namespace zeroshard {
namespace {

constexpr std::size_t kMaxShown = 20;
constexpr std::size_t kMaxSentence = 500;

std::string WithPosition(SourcePosition at, std::string_view what) {
  const std::string text = Shorten(what, kMaxSentence);
  return at.line == 0 ? text : Concat(PositionText(at), ": ", text);
}

// "a", "a and b", "a, b and c"
std::string Enumerate(const std::vector<std::string>& words) {
  std::string out;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += i + 1 == words.size() ? " and " : ", ";
    out += words[i];
  }
  return out;
}

}  // namespace

void Findings::Error(SourcePosition at, std::string_view what) {
  errors_.push_back(WithPosition(at, what));
}

void Findings::Warn(SourcePosition at, std::string_view sentence) {
  warnings_.push_back(WithPosition(at, sentence));
}

void Findings::NoEffect(std::string_view path, std::string_view reason) {
  const auto same = [&](const auto& entry) { return entry.first == reason; };
  auto entry = std::find_if(no_effect_.begin(), no_effect_.end(), same);
  if (entry == no_effect_.end()) {
    no_effect_.emplace_back(reason, std::vector<std::string>{});
    entry = std::prev(no_effect_.end());
  }
  if (std::find(entry->second.begin(), entry->second.end(), path) == entry->second.end()) {
    entry->second.emplace_back(path);
  }
}

void Findings::Unresolved(std::string_view path, SourcePosition at) {
  unresolved_.push_back(at.line == 0 ? std::string(path)
                                     : Concat(path, " (", PositionText(at), ")"));
}

absl::Status Findings::ToStatus() const {
  std::vector<std::string> all = errors_;
  if (!unresolved_.empty()) {
    all.insert(all.begin(),
               Concat("\"auto\" was not resolved: the client gives no value for ",
                      Enumerate(unresolved_), "; write a value or let the client give one"));
  }
  if (all.empty()) return absl::OkStatus();
  if (all.size() == 1) return absl::InvalidArgumentError(Concat("ds_config: ", all.front()));
  std::string text = Concat("ds_config has ", all.size(), " errors:");
  for (std::size_t i = 0; i < std::min(all.size(), kMaxShown); ++i) text += "\n  " + all[i];
  if (all.size() > kMaxShown) text += Concat("\n  and ", all.size() - kMaxShown, " more");
  return absl::InvalidArgumentError(text);
}

std::vector<std::string> Findings::Warnings() const {
  std::vector<std::string> all = warnings_;
  for (const auto& [reason, paths] : no_effect_) {
    all.push_back(Concat(Enumerate(paths), paths.size() == 1 ? " has" : " have",
                         " no effect: ", reason, "."));
  }
  return all;
}

void Settings::Set(Setting setting) {
  settings_.insert_or_assign(std::string(setting.spec->path), std::move(setting));
}

const Setting* Settings::Find(std::string_view path) const {
  const auto found = settings_.find(path);
  return found == settings_.end() ? nullptr : &found->second;
}

const JsonValue* Settings::Value(std::string_view path) const {
  const Setting* setting = Find(path);
  if (setting == nullptr || setting->value.kind == JsonValue::Kind::kNull) return nullptr;
  return &setting->value;
}

bool Settings::Has(std::string_view path) const { return Value(path) != nullptr; }

bool Settings::Given(std::string_view path) const {
  const Setting* setting = Find(path);
  return Has(path) && setting->origin != ValueOrigin::kDefault &&
         setting->origin != ValueOrigin::kCompat;
}

std::optional<std::int64_t> Settings::OptionalInt(std::string_view path) const {
  const JsonValue* value = Value(path);
  if (value == nullptr) return std::nullopt;
  return static_cast<std::int64_t>(std::strtoll(value->text.c_str(), nullptr, 10));
}

std::int64_t Settings::Int(std::string_view path) const { return OptionalInt(path).value_or(0); }

double Settings::Float(std::string_view path) const {
  const JsonValue* value = Value(path);
  return value == nullptr ? 0 : NumberValue(value->text).value_or(0);
}

bool Settings::Bool(std::string_view path) const {
  const JsonValue* value = Value(path);
  return value != nullptr && value->boolean;
}

std::string Settings::Text(std::string_view path) const {
  const JsonValue* value = Value(path);
  return value == nullptr ? std::string() : value->text;
}

SourcePosition Settings::At(std::string_view path) const {
  const Setting* setting = Find(path);
  return setting == nullptr ? SourcePosition() : setting->value.at;
}

}  // namespace zeroshard
