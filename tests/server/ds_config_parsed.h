// What the tests of the configuration have in common: parsing with the expectation in the call.
#ifndef ZEROSHARD_TESTS_SERVER_DS_CONFIG_PARSED_H_
#define ZEROSHARD_TESTS_SERVER_DS_CONFIG_PARSED_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "server/ds_config.h"

namespace zeroshard {

// The configuration; a failure ends the test with the message.
inline DsConfig Parsed(std::string_view text, const ClientValues& client = {}) {
  const absl::StatusOr<DsConfig> config = ParseDsConfig(text, client);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : DsConfig();
}

// The error's message; "" (and a failure) when it was taken.
inline std::string Refusal(std::string_view text, const ClientValues& client = {}) {
  const absl::StatusOr<DsConfig> config = ParseDsConfig(text, client);
  EXPECT_FALSE(config.ok()) << text;
  if (config.ok()) return "";
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(config.status().message());
}

inline std::string Warnings(std::string_view text) {
  return absl::StrJoin(Parsed(text).warnings, "\n");
}

inline ResolvedValue Resolved(const DsConfig& config, std::string_view path) {
  for (const ResolvedValue& value : config.resolved) {
    if (value.path == path) return value;
  }
  ADD_FAILURE() << path << " is not among the resolved values";
  return {};
}

inline std::string Zero(std::string_view members) {
  return absl::StrCat("{\"zero_optimization\": {", std::string(members), "}}");
}

#define EXPECT_HAS(text, part) EXPECT_TRUE(absl::StrContains(text, part)) << (text)

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_SERVER_DS_CONFIG_PARSED_H_
