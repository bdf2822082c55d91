// sources: server/hjson*.cc server/ds_config*.cc !server/ds_config_tables.cc base/status.cc
// sources: server/nvme_paths.cc base/log.cc
// libs: absl_status absl_statusor absl_strings absl_str_format spdlog
// seeds: tests/fuzz/seeds/ds_config

// Any text as ds_config.json, with a client that fills some values: no crash, no exception, and
// whatever is taken can be explained, rendered and read again.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "server/ds_config.h"
#include "server/hjson.h"

namespace zeroshard {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckTaken(const DsConfig& config) {
  Require(config.zero.stage >= 0 && config.zero.stage <= 3);
  Require(config.zero.reduce_bucket_size > 0 && config.zero.sub_group_size > 0);
  Require(config.zero.prefetch_bucket_size >= 0 && config.zero.max_live_parameters >= 0);
  Require(config.gradient_clipping >= 0);
  Require(config.optimizer.lr >= 0 && config.optimizer.beta1 < 1 && config.optimizer.beta2 < 1);
  Require(!config.loss_scale.enabled || !config.loss_scale.dynamic || config.loss_scale.window > 0);
  Require(!config.zeroshard.compat_version.empty());
  Require(config.aio.block_size > 0 && config.aio.block_size % 4096 == 0);
  Require(!config.tiers.optimizer || config.zero.stage > 0);
  Require(!config.tiers.parameters || config.zero.stage == 3);
  Require(config.zeroshard.durability != DurabilityChoice::kPower || config.tiers.optimizer);
  Require(ParseHjson(ExplainJson(config)).ok());
  Require(ExplainLines(config).size() >= config.resolved.size());
  for (const std::int64_t ranks : {1, 2, 7}) {
    const absl::StatusOr<Batch> batch = ResolveBatch(config.batch, ranks);
    Require(!batch.ok() || batch->train == batch->micro * batch->accumulation * ranks);
  }
}

void CheckValue(std::string_view text) {
  const absl::StatusOr<JsonValue> value = ParseHjson(text);
  if (!value.ok()) return;
  const absl::StatusOr<JsonValue> again = ParseHjson(RenderJson(*value));
  // Rendering may make a text longer than what is read (escapes); nothing else may fail.
  Require(again.ok() || RenderJson(*value).size() > kMaxHjsonBytes);
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  zeroshard::CheckValue(text);
  if (const auto config = zeroshard::ParseDsConfig(text); config.ok()) {
    zeroshard::CheckTaken(*config);
  }
  const zeroshard::ClientValues client = {{"train_micro_batch_size_per_gpu", "4"},
                                          {"optimizer.params.lr", "3e-4"},
                                          {"zero_optimization.reduce_bucket_size", "16777216"}};
  zeroshard::ParseDsConfig(text, client, zeroshard::DeviceKind::kCuda).status().IgnoreError();
  if (const auto config = zeroshard::ParseDsConfig(text, client); config.ok()) {
    zeroshard::CheckTaken(*config);
  }
  // The first line as a key, the rest as its value: what a client may send.
  const std::size_t line = text.find('\n');
  if (line != std::string_view::npos) {
    const zeroshard::ClientValues hostile = {
        {std::string(text.substr(0, line)), std::string(text.substr(line + 1))}};
    if (const auto config = zeroshard::ParseDsConfig("{}", hostile); config.ok()) {
      zeroshard::CheckTaken(*config);
    }
  }
  return 0;
}
