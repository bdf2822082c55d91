#include "tests/fakes/cuda/settings.h"

#include <charconv>
#include <cstdlib>
#include <functional>
#include <map>

#include "tests/fakes/cuda/errors.h"

namespace zeroshard::fake_cuda {
namespace {

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

uint64_t Number(const std::string& key, const std::string& text) {
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, value);
  int shift = 0;
  if (rest != end && rest + 1 == end) {
    shift = *rest == 'K' ? 10 : *rest == 'M' ? 20 : *rest == 'G' ? 30 : 0;
    if (shift > 0) ++rest;
  }
  if (error != std::errc() || rest != end) {
    Die("ZEROSHARD_FAKE_CUDA: " + key + " is '" + text + "', not a number");
  }
  return value << shift;
}

CUresult ErrorNamed(const std::string& name) {
  const std::optional<CUresult> error = ErrorByName(name);
  if (!error.has_value()) Die("ZEROSHARD_FAKE_CUDA: cuda.h has no error '" + name + "'");
  return *error;
}

// <api>:<k>:<error>, lost:<k>[:<error>] or hang:<k>.
void AddFault(const std::string& text, Settings* settings) {
  const std::vector<std::string> parts = Split(text, ':');
  if (parts.size() == 2 && parts[0] == "hang") {
    settings->hang_at = Number("hang", parts[1]);
  } else if ((parts.size() == 2 || parts.size() == 3) && parts[0] == "lost") {
    settings->lost_at = Number("lost", parts[1]);
    if (parts.size() == 3) settings->lost_error = ErrorNamed(parts[2]);
  } else if (parts.size() == 3) {
    settings->faults.push_back({parts[0], Number("fault", parts[1]), ErrorNamed(parts[2])});
  } else {
    Die("ZEROSHARD_FAKE_CUDA: '" + text +
        "' is no fault: <api>:<k>:<error>, lost:<k>[:<error>], hang:<k>");
  }
}

using Setter = std::function<void(Settings*, const std::string& key, const std::string& value)>;

const std::map<std::string, Setter>& Setters() {
  using S = Settings*;
  using T = const std::string&;
  static const auto* const setters = new std::map<std::string, Setter>{
      {"devices", [](S s, T k, T v) { s->devices = static_cast<int>(Number(k, v)); }},
      {"memory", [](S s, T k, T v) { s->memory = Number(k, v); }},
      {"driver", [](S s, T k, T v) { s->driver = static_cast<int>(Number(k, v)); }},
      {"cc",
       [](S s, T k, T v) {
         const std::vector<std::string> parts = Split(v, '.');
         if (parts.size() != 2) Die("ZEROSHARD_FAKE_CUDA: cc is like 9.0, not '" + v + "'");
         s->major = static_cast<int>(Number(k, parts[0]));
         s->minor = static_cast<int>(Number(k, parts[1]));
       }},
      {"name", [](S s, T, T v) { s->name = v; }},
      {"mig", [](S s, T k, T v) { s->mig = Number(k, v) != 0; }},
      {"poison", [](S s, T k, T v) { s->poison = Number(k, v) != 0; }},
      {"node", [](S s, T, T v) { s->node = v; }},
      {"jitter", [](S s, T k, T v) { s->jitter = Number(k, v); }},
      {"only", [](S s, T, T v) { s->only = v; }},
      {"once", [](S s, T k, T v) { s->once = Number(k, v) != 0; }},
      {"fault",
       [](S s, T, T v) {
         for (const std::string& fault : Split(v, '|')) AddFault(fault, s);
       }},
  };
  return *setters;
}

}  // namespace

Settings ParseSettings(const std::string& text) {
  Settings settings;
  for (const std::string& part : Split(text, ',')) {
    const size_t equals = part.find('=');
    if (equals == std::string::npos) {  // lost:<k> and hang:<k> may stand alone
      AddFault(part, &settings);
      continue;
    }
    const std::string key = part.substr(0, equals);
    const auto setter = Setters().find(key);
    if (setter == Setters().end()) Die("ZEROSHARD_FAKE_CUDA: unknown key '" + key + "'");
    setter->second(&settings, key, part.substr(equals + 1));
  }
  if (settings.devices > 64) Die("ZEROSHARD_FAKE_CUDA: at most 64 devices");
  return settings;
}

Settings SettingsFromEnvironment() {
  const char* const text = std::getenv("ZEROSHARD_FAKE_CUDA");
  return ParseSettings(text == nullptr ? "" : text);
}

}  // namespace zeroshard::fake_cuda
