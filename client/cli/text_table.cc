#include "client/cli/text_table.h"

#include <algorithm>
#include <cctype>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace zeroshard {
namespace {

bool LooksLikeNumber(const std::string& cell) {
  return !cell.empty() && std::isdigit(static_cast<unsigned char>(cell[0])) != 0;
}

// Code points, not bytes: names may hold any UTF-8.
size_t Width(const std::string& cell) {
  return static_cast<size_t>(std::count_if(cell.begin(), cell.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

}  // namespace

std::string TextTable::Text() const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  std::vector<bool> numeric(rows_[0].size(), rows_.size() > 1);
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (size_t c = 0; c < widths.size(); ++c) {
      widths[c] = std::max(widths[c], Width(rows_[r][c]));
      if (r > 0 && !rows_[r][c].empty() && !LooksLikeNumber(rows_[r][c])) numeric[c] = false;
    }
  }
  std::string text;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (size_t c = 0; c < widths.size(); ++c) {
      const std::string cell = r == 0 ? absl::AsciiStrToUpper(rows_[r][c]) : rows_[r][c];
      const std::string space(widths[c] - Width(cell), ' ');
      absl::StrAppend(&line, c == 0 ? "" : "  ", numeric[c] ? space : "", cell,
                      numeric[c] ? "" : space);
    }
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

std::string ReadableBytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.2f %s", value, kUnits[unit]);
}

std::string ReadableSeconds(uint64_t seconds) {
  const uint64_t minutes = seconds / 60;
  const uint64_t hours = minutes / 60;
  if (hours >= 24) return absl::StrCat(hours / 24, " d ", hours % 24, " h");
  if (hours > 0) return absl::StrCat(hours, " h ", minutes % 60, " min");
  if (minutes > 0) return absl::StrCat(minutes, " min ", seconds % 60, " s");
  return absl::StrCat(seconds, " s");
}

std::string ReadableCount(uint64_t count) {
  std::string digits = std::to_string(count);
  for (size_t end = digits.size(); end > 3; end -= 3) digits.insert(end - 3, ",");
  return digits;
}

}  // namespace zeroshard
