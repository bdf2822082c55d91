#include <string>
#include <string_view>
#include <vector>

#include "server/ds_config_settings.h"
#include "server/hjson_text.h"
#include "server/text.h"

// Step 5: in which form a job holds its master parameters and optimizer states. Several keys say
// so, DeepSpeed's and our own; this makes one value of them, or an error that names both keys.

namespace zeroshard {
namespace {

constexpr std::string_view kStage = "zero_optimization.stage";
constexpr std::string_view kMaster = "zeroshard.master";
constexpr std::string_view kStates = "zeroshard.optimizer_states";
constexpr std::string_view kSeed = "zeroshard.rounding_seed";
constexpr std::string_view kBf16Master = "bf16.bf16_master_weights_and_grads";
constexpr std::string_view kBf16States = "bf16.bf16_optimizer_states";
constexpr std::string_view kFp32States = "optimizer.params.fp32_optimizer_states";
constexpr std::string_view kAccumulator = "data_types.grad_accum_dtype";

// What "auto" is for the master of a bf16 job.
constexpr std::string_view kAutoMasterOfBf16 = "split";

// A value that another key asks for: `by` reads as "optimizer.type AdamW8bit".
struct Claim {
  std::string_view value;
  std::string by;
  SourcePosition at;
};

void SetText(std::string_view path, std::string_view text, ValueOrigin origin,
             const std::string& note, Settings& settings) {
  const Setting* before = settings.Find(path);
  Setting setting{.spec = FindKey(path), .value = {}, .origin = origin, .note = note};
  if (before != nullptr) setting.value.at = before->value.at;
  setting.value.kind = JsonValue::Kind::kString;
  setting.value.text = std::string(text);
  settings.Set(std::move(setting));
}

// Gives the key at `path` the value that file, client or a claim names, else `fallback`.
void Settle(std::string_view path, const std::vector<Claim>& claims, std::string_view fallback,
            const std::string& why, Settings& settings, Findings& findings) {
  const std::string written = settings.Text(path);
  std::string_view value = written;
  std::string by = Concat(path, " ", JsonQuote(written));
  if (written.empty() || written == "auto") value = "";
  for (const Claim& claim : claims) {
    if (value.empty()) {
      value = claim.value;
      by = claim.by;
    } else if (value != claim.value) {
      findings.Error(claim.at, Concat(claim.by, " asks for ", path, " ", JsonQuote(claim.value),
                                      ", and ", by, " for ", JsonQuote(value), "; remove one"));
    }
  }
  if (value.empty()) {
    const Setting* setting = settings.Find(path);
    SetText(path, fallback, setting == nullptr ? ValueOrigin::kDefault : setting->origin, why,
            settings);
  } else if (value != written) {
    SetText(path, std::string(value), ValueOrigin::kAlias, Concat("written as ", by), settings);
  }
}

void SettleMaster(Settings& settings, Findings& findings) {
  const bool bf16 = settings.Bool("bf16.enabled");
  std::vector<Claim> claims;
  if (bf16 && settings.Bool(kBf16Master)) {
    claims.push_back({"none", Concat(kBf16Master, " true"), settings.At(kBf16Master)});
    if (!settings.Has(kAccumulator)) {
      SetText(kAccumulator, "bf16", ValueOrigin::kAlias, Concat("written as ", claims.front().by),
              settings);
    }
  }
  std::string_view why = "auto: parameters of 32 bits are their own master";
  if (bf16) why = "auto: of a bf16 job";
  if (settings.Bool("fp16.enabled")) why = "auto: fp16 parameters are never split";
  Settle(kMaster, claims, bf16 ? kAutoMasterOfBf16 : "fp32", std::string(why), settings, findings);
}

void SettleStates(Settings& settings, Findings& findings) {
  const bool bf16 = settings.Bool("bf16.enabled");
  std::vector<Claim> claims;
  if (settings.optimizer != nullptr && settings.optimizer->type.ends_with("8bit")) {
    claims.push_back({"int8", Concat("optimizer.type ", settings.optimizer->type),
                      settings.At("optimizer.type")});
  }
  if (bf16 && settings.Bool(kBf16States)) {
    claims.push_back({"bf16", Concat(kBf16States, " true"), settings.At(kBf16States)});
  }
  if (settings.Given(kFp32States)) {
    const bool fp32 = settings.Bool(kFp32States);
    if (fp32) claims.push_back({"fp32", Concat(kFp32States, " true"), settings.At(kFp32States)});
    if (!fp32 && bf16) {
      claims.push_back({"bf16", Concat(kFp32States, " false"), settings.At(kFp32States)});
    }
  }
  Settle(kStates, claims, "fp32", "", settings, findings);
}

// The text of the key that made `path` what it is.
std::string Spelling(std::string_view path, const Settings& settings) {
  const Setting* setting = settings.Find(path);
  std::string text = Concat(path, " is ", JsonQuote(settings.Text(path)));
  if (setting->origin == ValueOrigin::kAlias) text += Concat(" (", setting->note, ")");
  return text;
}

void CheckMaster(const Settings& settings, Findings& findings) {
  const std::string master = settings.Text(kMaster);
  const SourcePosition at = settings.At(kMaster);
  if (master == "fp32") return;
  if (!settings.Bool("bf16.enabled")) {
    const bool fp16 = settings.Bool("fp16.enabled");
    findings.Error(at, Concat(Spelling(kMaster, settings), ", which only bf16 jobs can have: ",
                              fp16 ? "fp16 parameters are updated through an fp32 master, never "
                                     "split and never rounded stochastically"
                                   : "this job's parameters are fp32 and their own master",
                              "; write \"auto\", or enable bf16"));
    return;
  }
  if (master == "none" && settings.Int(kStage) == 0) {
    findings.Error(at, Concat(Spelling(kMaster, settings),
                              ", which needs stage 1, 2 or 3, and the stage is 0; write a stage, "
                              "or \"auto\""));
  }
}

void CheckStates(const Settings& settings, Findings& findings) {
  if (settings.Text(kStates) == "int8" && settings.optimizer != nullptr &&
      settings.optimizer->type == "Adagrad") {
    findings.Error(settings.At(kStates),
                   Concat(Spelling(kStates, settings),
                          ", and there are no 8-bit states for Adagrad (for AdamW, Adam, Lion and "
                          "SGD with momentum there are); write \"fp32\" or \"bf16\""));
  }
  if (settings.Bool(kBf16States) && settings.Bool("bf16.enabled") && !settings.Bool(kBf16Master)) {
    findings.Error(settings.At(kBf16States), Concat(kBf16States, " needs ", kBf16Master,
                                                    ", as in DeepSpeed; for bf16 states "
                                                    "beside a master write ",
                                                    kStates, " \"bf16\""));
  }
  if (!settings.Given(kFp32States) || settings.Bool(kFp32States)) return;
  if (settings.Bool("fp16.enabled")) {
    findings.Error(settings.At(kFp32States),
                   Concat(kFp32States,
                          " false asks for states of the parameters' type, and there "
                          "are no fp16 states; remove it, or write ",
                          kStates, " \"bf16\""));
  } else if (!settings.Bool("bf16.enabled")) {
    findings.NoEffect(kFp32States, "states have the parameters' type, which is fp32");
  }
}

// A job whose states can be on nvme holds the split master whole, with the same values; and without
// a master each parameter once more.
void NoteWholeMaster(Settings& settings) {
  const Setting* setting = settings.Find(kMaster);
  const std::string master = settings.Text(kMaster);
  if ((master != "split" && master != "none") || !TierUseOf(settings).tiered) return;
  Setting noted = *setting;
  noted.note += Concat(noted.note.empty() ? "" : "; ",
                       master == "split" ? "held with all its 32 bits"
                                         : "parameters are held once more beside the states",
                       ", because states can be on nvme");
  settings.Set(std::move(noted));
}

}  // namespace

void SettleStateForms(Settings& settings, Findings& findings) {
  SettleMaster(settings, findings);
  NoteWholeMaster(settings);
  SettleStates(settings, findings);
  CheckMaster(settings, findings);
  CheckStates(settings, findings);
  if (!settings.Bool("bf16.enabled")) {
    for (const std::string_view path : {kBf16Master, kBf16States}) {
      if (settings.Given(path)) findings.NoEffect(path, "bf16 is not enabled");
    }
  }
  if (settings.Given(kSeed) && settings.Text(kMaster) != "none") {
    findings.NoEffect(kSeed, "only zeroshard.master \"none\" rounds stochastically");
  }
}

}  // namespace zeroshard
