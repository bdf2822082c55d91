#include "server/ds_config_keys.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <vector>

#include "server/text.h"

namespace zeroshard {
namespace {

std::string Lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

const std::map<std::string_view, const KeySpec*>& Index() {
  static const auto* const index = [] {
    auto* map = new std::map<std::string_view, const KeySpec*>;
    for (const KeySpec* spec : AllKeys()) map->emplace(spec->path, spec);
    return map;
  }();
  return *index;
}

// How many changes still look like a typo in a name of that length.
int Tolerance(std::size_t length) {
  if (length < 4) return 1;
  return length < 12 ? 2 : 3;
}

// The nearest key of the same block, or null.
const KeySpec* Nearest(std::string_view path) {
  const std::string_view parent = ParentPath(path);
  const std::string name = Lower(LeafName(path));
  const KeySpec* best = nullptr;
  int best_distance = Tolerance(name.size()) + 1;
  for (const KeySpec* spec : AllKeys()) {
    if (ParentPath(spec->path) != parent || spec->status == KeyStatus::kAlias) continue;
    const int distance = EditDistance(name, Lower(LeafName(spec->path)));
    if (distance >= best_distance) continue;
    best = spec;
    best_distance = distance;
  }
  return best;
}

// A key of exactly that name in another block; the shortest path wins. Null when there is none.
const KeySpec* Elsewhere(std::string_view path) {
  const KeySpec* best = nullptr;
  for (const KeySpec* spec : AllKeys()) {
    if (LeafName(spec->path) != LeafName(path) || LeafName(path) == "enabled") continue;
    if (best == nullptr || spec->path.size() < best->path.size()) best = spec;
  }
  return best;
}

}  // namespace

std::vector<const KeySpec*> AllKeys() {
  std::vector<const KeySpec*> keys;
  for (const auto table : {TopKeys(), ZeroKeys(), PrecisionKeys(), TrainerKeys()}) {
    for (const KeySpec& spec : table) keys.push_back(&spec);
  }
  return keys;
}

const KeySpec* FindKey(std::string_view path) {
  const auto found = Index().find(path);
  return found == Index().end() ? nullptr : found->second;
}

std::string_view ParentPath(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

std::string_view LeafName(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string AdviceForUnknownKey(std::string_view path) {
  if (LeafName(path).size() > 64) return "";
  if (const KeySpec* spec = Elsewhere(path); spec != nullptr) {
    const std::string_view parent = ParentPath(spec->path);
    return parent.empty() ? Concat("it belongs to the top level")
                          : Concat("it belongs to the block ", parent);
  }
  if (const KeySpec* spec = Nearest(path); spec != nullptr) {
    return Concat("did you mean ", LeafName(spec->path), "?");
  }
  return "";
}

int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> before_last(b.size() + 1);
  std::vector<int> last(b.size() + 1);
  std::vector<int> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const int change = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    before_last = last;
    last = row;
  }
  return last[b.size()];
}

}  // namespace zeroshard
