#include "base/log.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/strings.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace zeroshard {
namespace {

std::unique_ptr<spdlog::pattern_formatter> MakeFormatter(std::string_view process) {
  std::string pattern = "ts=%Y-%m-%dT%H:%M:%S.%fZ level=%l process=";
  for (const char c : process) {
    if (c == '%') pattern += '%';
    pattern += c;
  }
  pattern += " pid=%P msg=%v";
  return std::make_unique<spdlog::pattern_formatter>(pattern, spdlog::pattern_time_type::utc);
}

// Never destroyed: threads may log until the process ends.
spdlog::logger& Logger() {
  static spdlog::logger* const kLogger = [] {
    auto* logger =
        new spdlog::logger("zeroshard", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    logger->set_formatter(MakeFormatter("zeroshard"));
    return logger;
  }();
  return *kLogger;
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

void Write(LogLevel level, std::string_view message) {
  if (!Logger().should_log(ToSpdlog(level))) return;
  Logger().log(ToSpdlog(level), spdlog::string_view_t(QuoteForLog(message)));
}

}  // namespace

void SetLogLevel(LogLevel level) { Logger().set_level(ToSpdlog(level)); }

absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "info") return LogLevel::kInfo;
  if (name == "warn" || name == "warning") return LogLevel::kWarn;
  if (name == "error") return LogLevel::kError;
  if (name == "off") return LogLevel::kOff;
  return absl::InvalidArgumentError(absl::StrCat("unknown log level \"", Abs(name),
                                                 "\": expected debug, info, warn, error or off"));
}

void SetLogProcess(std::string_view name) { Logger().set_formatter(MakeFormatter(name)); }

void LogDebug(std::string_view message) { Write(LogLevel::kDebug, message); }
void LogInfo(std::string_view message) { Write(LogLevel::kInfo, message); }
void LogWarn(std::string_view message) { Write(LogLevel::kWarn, message); }
void LogError(std::string_view message) { Write(LogLevel::kError, message); }

std::string QuoteForLog(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (c == '\t') {
      quoted += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      absl::StrAppendFormat(&quoted, "\\x%02x", byte);
    } else {
      quoted += c;
    }
  }
  quoted += '"';
  return quoted;
}

}  // namespace zeroshard
