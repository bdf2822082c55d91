// The log: one line per event on stderr, made of key=value pairs.
//
//   ts=2025-01-31T12:00:00.123456Z level=info process=zeroshardd pid=4711 msg="job gpt is running"
//
// A message is one sentence; further pairs may be appended by the caller to the text itself. Line
// breaks, quotes and control characters are escaped, so that a line is always one event. Hot paths
// count in metrics (base/metrics.h) and do not log. All functions may be called from any thread.

#ifndef ZEROSHARD_BASE_LOG_H_
#define ZEROSHARD_BASE_LOG_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace zeroshard {

enum class LogLevel { kDebug, kInfo, kWarn, kError, kOff };

// Messages below `level` are dropped. The default is kInfo.
void SetLogLevel(LogLevel level);

// "debug", "info", "warn", "error", "off"; InvalidArgument names these.
absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name);

// The value of process= in every line; set once at the start of main().
void SetLogProcess(std::string_view name);

void LogDebug(std::string_view message);
void LogInfo(std::string_view message);
void LogWarn(std::string_view message);
void LogError(std::string_view message);

// `text` in double quotes with \n, \t, \", \\ and \xNN escapes; as the log writes a message.
std::string QuoteForLog(std::string_view text);

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_LOG_H_
