#include <cstdint>

#include "absl/status/status.h"
#include "server/ds_config.h"
#include "server/text.h"

namespace zeroshard {
namespace {

constexpr std::int64_t kLargestBatch = 2147483647;

std::string Shown(const std::optional<std::int64_t>& value) {
  return value.has_value() ? Concat(*value) : "not given";
}

// "train_batch_size 8, train_micro_batch_size_per_gpu 2, ... on 4 ranks"
std::string Given(const BatchConfig& batch, std::int64_t ranks) {
  return Concat("train_batch_size ", Shown(batch.train), ", train_micro_batch_size_per_gpu ",
                Shown(batch.micro), ", gradient_accumulation_steps ", Shown(batch.accumulation),
                ", on ", ranks, ranks == 1 ? " rank" : " ranks");
}

// a * b * c, or nothing when it does not fit.
std::optional<std::int64_t> Product(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product)) {
    return std::nullopt;
  }
  return product;
}

// Fills in what is missing, by floor division as DeepSpeed does. All given values are positive,
// and train or micro is among them.
Batch Derive(const BatchConfig& batch, std::int64_t ranks) {
  Batch derived;
  if (batch.train.has_value()) {
    derived.train = *batch.train;
    const std::int64_t per_rank = derived.train / ranks;
    if (batch.micro.has_value()) {
      derived.micro = *batch.micro;
      derived.accumulation = batch.accumulation.value_or(derived.train / derived.micro / ranks);
    } else {
      derived.accumulation = batch.accumulation.value_or(1);
      derived.micro = per_rank / derived.accumulation;
    }
    return derived;
  }
  derived.micro = *batch.micro;
  derived.accumulation = batch.accumulation.value_or(1);
  derived.train = Product(derived.micro, derived.accumulation, ranks).value_or(0);
  return derived;
}

}  // namespace

absl::StatusOr<Batch> ResolveBatch(const BatchConfig& batch, std::int64_t ranks) {
  const auto error = [&](std::string_view what) {
    return absl::InvalidArgumentError(Concat(what, " (", Given(batch, ranks), ")"));
  };
  if (ranks < 1) return error("a batch needs at least one rank");
  for (const auto& value : {batch.train, batch.micro, batch.accumulation}) {
    if (value.has_value() && *value < 1) return error("batch sizes must be at least 1");
  }
  if (!batch.train.has_value() && !batch.micro.has_value()) {
    return error("train_batch_size or train_micro_batch_size_per_gpu must be given");
  }
  const Batch derived = Derive(batch, ranks);
  const std::optional<std::int64_t> product = Product(derived.micro, derived.accumulation, ranks);
  if (!product.has_value() || *product > kLargestBatch) {
    return error(Concat("a step of more than ", kLargestBatch, " samples"));
  }
  if (*product != derived.train || *product == 0) {
    return error(Concat(
        "train_batch_size must be micro batch * accumulation * ranks: ", derived.train, " is not ",
        derived.micro, " * ", derived.accumulation, " * ", ranks, " = ", *product));
  }
  return derived;
}

}  // namespace zeroshard
