#include "tests/fakes/nccl/settings.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

namespace zeroshard::fake_nccl {
namespace {

struct Shared {
  std::mutex mu;
  std::optional<Settings> settings;
  std::map<std::string, uint64_t> counts;
  std::string last_error;
};

// Never destroyed: threads that hang outlive main.
Shared& TheShared() {
  static Shared* const shared = new Shared;
  return *shared;
}

uint64_t Number(const std::string& word, size_t at) {
  char* end = nullptr;
  const uint64_t value = std::strtoull(word.c_str() + at, &end, 10);
  if (end == word.c_str() + at || *end != '\0') Misuse("ZEROSHARD_FAKE_NCCL: bad number: " + word);
  return value;
}

bool Starts(const std::string& word, const std::string& prefix) {
  return word.compare(0, prefix.size(), prefix) == 0;
}

void ParseWord(const std::string& word, Settings& settings) {
  const auto number = [&](const char* prefix, auto& value) {
    if (!Starts(word, prefix)) return false;
    value = static_cast<std::decay_t<decltype(value)>>(Number(word, std::string(prefix).size()));
    return true;
  };
  if (word == "init-hangs") {
    settings.init_hangs = true;
  } else if (word == "init-fails") {
    settings.init_fails = true;
  } else if (word == "abort-hangs") {
    settings.abort_hangs = true;
  } else if (word == "registers-nothing") {
    settings.registers_nothing = true;
  } else if (word == "dead-peer=error") {
    settings.dead_peer_is_error = true;
  } else if (word == "dead-peer=hang") {
    settings.dead_peer_is_error = false;
  } else if (!number("version=", settings.version) && !number("hang:", settings.hang_at) &&
             !number("error:", settings.error_at) && !number("fail:", settings.fail_at) &&
             !number("launch-hang:", settings.launch_hang_at) && !number("rank=", settings.rank)) {
    Misuse("ZEROSHARD_FAKE_NCCL: unknown word: " + word);
  }
}

}  // namespace

Settings ParseSettings(const std::string& text) {
  Settings settings;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    if (!word.empty()) ParseWord(word, settings);
  }
  return settings;
}

Settings CurrentSettings() {
  Shared& shared = TheShared();
  std::lock_guard lock(shared.mu);
  if (!shared.settings) {
    const char* text = std::getenv("ZEROSHARD_FAKE_NCCL");
    shared.settings = ParseSettings(text == nullptr ? "" : text);
  }
  return *shared.settings;
}

void SetSettings(const char* text) {
  const char* from = text != nullptr ? text : std::getenv("ZEROSHARD_FAKE_NCCL");
  const Settings settings = ParseSettings(from == nullptr ? "" : from);
  Shared& shared = TheShared();
  std::lock_guard lock(shared.mu);
  shared.settings = settings;
  shared.counts.clear();
}

Settings SettingsOf(int rank) {
  Settings settings = CurrentSettings();
  if (settings.rank < 0 || settings.rank == rank) return settings;
  Settings clean;
  clean.version = settings.version;
  clean.dead_peer_is_error = settings.dead_peer_is_error;
  clean.registers_nothing = settings.registers_nothing;
  return clean;
}

void Count(const char* name) {
  Shared& shared = TheShared();
  std::lock_guard lock(shared.mu);
  ++shared.counts[name];
}

uint64_t CountOf(const std::string& name) {
  Shared& shared = TheShared();
  std::lock_guard lock(shared.mu);
  const auto found = shared.counts.find(name);
  return found == shared.counts.end() ? 0 : found->second;
}

void SetLastError(const std::string& text) {
  Shared& shared = TheShared();
  std::lock_guard lock(shared.mu);
  shared.last_error = text;
}

const char* LastError() {
  thread_local std::string copy;
  Shared& shared = TheShared();
  std::lock_guard lock(shared.mu);
  copy = shared.last_error;
  return copy.c_str();
}

void Misuse(const std::string& sentence) {
  std::fprintf(stderr, "fake NCCL: %s\n", sentence.c_str());
  std::abort();
}

}  // namespace zeroshard::fake_nccl
