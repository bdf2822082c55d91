// TextTable: aligned columns for people. Numbers are told apart by their text and set right. Pure.

#ifndef ZEROSHARD_CLIENT_CLI_TEXT_TABLE_H_
#define ZEROSHARD_CLIENT_CLI_TEXT_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace zeroshard {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) { rows_.push_back(std::move(header)); }

  // As many cells as the header has.
  void Add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  // Header in capitals, one line a row, two spaces between columns, no trailing spaces.
  std::string Text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// "1.50 GiB"; below 1 KiB in bytes.
std::string ReadableBytes(uint64_t bytes);

// "3 d 4 h", "2 h 5 min", "3 min 20 s", "12 s".
std::string ReadableSeconds(uint64_t seconds);

// "1,234,567".
std::string ReadableCount(uint64_t count);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_CLI_TEXT_TABLE_H_
