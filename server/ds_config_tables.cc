#include <cstdio>

#include "server/ds_config_keys.h"

// Prints the tables of docs/ds_config.md, which stand below its line "<!-- tables -->".
int main() {
  const std::string tables = zeroshard::RenderKeyTables();
  return std::fwrite(tables.data(), 1, tables.size(), stdout) == tables.size() ? 0 : 1;
}
