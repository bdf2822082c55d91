#ifndef ZEROSHARD_TESTS_SERVER_DS_CONFIG_ROWS_H_
#define ZEROSHARD_TESTS_SERVER_DS_CONFIG_ROWS_H_

#include <ostream>
#include <string_view>
#include <vector>

namespace zeroshard {

enum class Fate {
  kHonoured,
  kRefused,
  kRefusedBlock,  // the block as a whole
  kNoEffect,
  kAlias,       // sets another key
  kDeprecated,  // the same, with a warning
};

// One key of DeepSpeed 0.19.6, typed in from its source and not from our tables.
struct DeepSpeedRow {
  std::string_view path;
  std::string_view default_value;      // JSON; empty: none
  std::string_view other;              // another value that DeepSpeed takes
  std::string_view bad;                // a value that must be refused; empty: there is none
  Fate fate;                           // of `other`
  std::string_view sibling = {};       // members needed in the outermost block
  std::string_view beside = {};        // members needed at the top
  std::string_view within = {};        // members needed in the key's own block
  std::string_view default_here = {};  // where it is not DeepSpeed's
};

inline std::ostream& operator<<(std::ostream& out, const DeepSpeedRow& row) {
  return out << row.path;
}

std::vector<DeepSpeedRow> DeepSpeedRows();
std::vector<DeepSpeedRow> DeepSpeedZeroRows();
std::vector<DeepSpeedRow> DeepSpeedTopRows();
std::vector<DeepSpeedRow> DeepSpeedOptimizerRows();

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_SERVER_DS_CONFIG_ROWS_H_
