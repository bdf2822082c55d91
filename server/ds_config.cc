#include "server/ds_config.h"

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "base/status.h"
#include "server/ds_config_settings.h"
#include "server/hjson.h"
#include "server/text.h"

namespace zeroshard {
namespace {

// The urlsafe-base64 form: one word that decodes to something in braces.
std::string DecodeIfBase64(std::string_view text) {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=\n";
  if (text.size() > 2 * kMaxHjsonBytes || text.empty() ||
      text.find_first_not_of(kAlphabet) != std::string_view::npos) {
    return std::string(text);
  }
  std::string decoded;
  if (!absl::WebSafeBase64Unescape(Abs(text), &decoded) || decoded.find('{') == std::string::npos) {
    return std::string(text);
  }
  return decoded;
}

}  // namespace

absl::StatusOr<DsConfig> ParseDsConfig(std::string_view text, const ClientValues& client,
                                       DeviceKind devices) {
  absl::StatusOr<JsonValue> parsed = ParseHjson(DecodeIfBase64(text));
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(Concat("ds_config: ", Std(parsed.status().message())));
  }
  JsonValue root = *std::move(parsed);
  if (!root.is_object()) {
    return absl::InvalidArgumentError(
        Concat("ds_config: ", PositionText(root.at), ": expected a block in braces"));
  }
  Findings findings;
  Marks marks;
  RewriteLegacyForms(root, marks, findings);
  ApplyClientValues(client, root, marks, findings);
  Settings settings = ReadSettings(root, marks, findings);
  settings.devices = devices;
  FillDefaults(settings, findings);
  SettleStateForms(settings, findings);
  CheckRules(settings, findings);
  ZS_RETURN_IF_ERROR(findings.ToStatus());
  DsConfig config = BuildDsConfig(settings);
  config.warnings = findings.Warnings();
  return config;
}

}  // namespace zeroshard
