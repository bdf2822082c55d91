// Bridges between std::string_view, which this code uses, and absl::string_view, which is another
// type in the distribution's build of Abseil.

#ifndef ZEROSHARD_BASE_STRINGS_H_
#define ZEROSHARD_BASE_STRINGS_H_

#include <string_view>

#include "absl/strings/string_view.h"

namespace zeroshard {

// For calls into Abseil: absl::StrCat("no such file ", Abs(path)).
inline absl::string_view Abs(std::string_view text) { return {text.data(), text.size()}; }

// For what Abseil hands back: Std(status.message()).
inline std::string_view Std(absl::string_view text) { return {text.data(), text.size()}; }

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_STRINGS_H_
