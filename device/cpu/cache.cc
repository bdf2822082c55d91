#include "device/cpu/cache.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace zeroshard {

uint64_t LastLevelCacheBytes(const std::string& directory) {
  uint64_t largest = 0;
  for (int index = 0;; ++index) {
    std::ifstream file(absl::StrCat(directory, "/index", index, "/size"));
    uint64_t size = 0;
    if (!(file >> size)) return largest;
    char unit = 0;
    file >> unit;
    largest = std::max(largest, size << (unit == 'K' ? 10 : unit == 'M' ? 20 : 0));
  }
}

}  // namespace zeroshard
