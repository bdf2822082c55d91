#ifndef ZEROSHARD_SERVER_DS_CONFIG_KEYS_H_
#define ZEROSHARD_SERVER_DS_CONFIG_KEYS_H_

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// What is known about each key of a ds_config.json, as data: type, default, and what becomes of
// it here. The tables are read by the parser, by the printed explanation and by docs/ds_config.md
// (which tests compare with them), so that the three cannot disagree. Immutable; any thread.

namespace zeroshard {

enum class KeyType : std::uint8_t {
  kBool,
  kInt,       // 64-bit; integral floats such as 5e8 are integers
  kFloat,     // finite unless the row says otherwise
  kText,      // one of `choices` (any case) when there are any
  kTextList,  // a bare string is a list of one
  kIntList,
  kFloatPair,    // Adam's betas
  kFloatOrList,  // one number, or one for each parameter group
  kNumberish,    // anything at all: number, text, Infinity, list, null
  kBlock,
};

enum class KeyStatus : std::uint8_t {
  kHonoured,  // does what DeepSpeed's does
  kRefused,   // any value but the default is an error; without a default, every value is
  kNoEffect,  // accepted and checked; a warning names it
  kAlias,     // another spelling of `target`
};

// How unknown keys in a block are taken, as in DeepSpeed.
enum class UnknownKeys : std::uint8_t {
  kForbid,  // an error
  kIgnore,  // a warning
  kOpaque,  // not looked at
};

// Bits of KeySpec::flags.
inline constexpr unsigned kStrict = 1;     // text and booleans are no numbers, numbers no booleans
inline constexpr unsigned kNullable = 2;   // null is a value: "not set"
inline constexpr unsigned kAutoValue = 4;  // "auto" is a value of its own
inline constexpr unsigned kTrainer = 8;    // handed to the trainer's engine, which acts on it

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

struct KeySpec {
  std::string_view path;  // dotted, from the top
  KeyType type = KeyType::kBool;
  std::string_view default_value;  // JSON; empty: there is none
  KeyStatus status = KeyStatus::kHonoured;
  std::string_view note;  // what it does, or why it is refused or has no effect
  double min = -kNoLimit;
  double max = kNoLimit;
  unsigned flags = 0;
  std::string_view choices = {};               // "none|cpu|nvme"
  std::string_view target = {};                // of an alias
  UnknownKeys unknown = UnknownKeys::kForbid;  // of a block
};

// The parameters that one value of `optimizer.type` or `scheduler.type` takes.
struct VariantSpec {
  std::string_view type;
  std::span<const KeySpec> params;
};

// All tables but the variants', in the order in which they are printed.
std::span<const KeySpec> ZeroKeys();
std::span<const KeySpec> TopKeys();
std::span<const KeySpec> PrecisionKeys();
std::span<const KeySpec> TrainerKeys();
std::vector<const KeySpec*> AllKeys();

std::span<const VariantSpec> OptimizerVariants();
std::span<const VariantSpec> SchedulerVariants();
// Optimizers of DeepSpeed that this version does not have, lower case.
std::span<const std::string_view> OptimizersNotHere();

// The row of that path, or null.
const KeySpec* FindKey(std::string_view path);

// The block that the path lies in ("" at the top), and its last part.
std::string_view ParentPath(std::string_view path);
std::string_view LeafName(std::string_view path);

// Advice about an unknown key, as a sentence without a full stop: the known key that was meant,
// or the block that it belongs to; "" when nothing is near.
std::string AdviceForUnknownKey(std::string_view path);

// Number of inserted, deleted, changed and swapped characters between two short texts.
int EditDistance(std::string_view a, std::string_view b);

// The tables of docs/ds_config.md.
std::string RenderKeyTables();

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DS_CONFIG_KEYS_H_
