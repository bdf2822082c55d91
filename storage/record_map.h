// RecordMap: which record of which shard holds a grain of a kind of state. Pure; immutable once
// sealed.
#ifndef ZEROSHARD_STORAGE_RECORD_MAP_H_
#define ZEROSHARD_STORAGE_RECORD_MAP_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "storage/layout.h"
#include "storage/shard_format.h"

namespace zeroshard {

struct RecordPlace {
  size_t shard = 0;  // index in the order of Add
  ShardRecord record;
};

class RecordMap {
 public:
  // Adds the records of shard `shard`. DataLoss, naming `path`, for a record outside the layout.
  absl::Status Add(size_t shard, std::span<const ShardRecord> records, const Layout& layout,
                   const std::string& path);

  // Sorts. DataLoss when two records hold the same grain, or records of one kind and unit differ in
  // data type. Call once, before Find.
  absl::Status Seal();

  // All records of one kind of state of a unit, in order of grains; empty when there are none.
  std::span<const RecordPlace> Find(uint32_t unit, std::string_view kind) const;

  // Those that hold grains of `range`. DataLoss naming the first grain that no record holds,
  // NotFound when there is no record of the kind at all.
  absl::StatusOr<std::span<const RecordPlace>> Cover(uint32_t unit, std::string_view kind,
                                                     GrainRange range) const;

  // The kinds there are, sorted.
  std::vector<std::string> Kinds() const;

  // Every record, in order of kind, unit and grain.
  std::vector<const RecordPlace*> All() const;

 private:
  using Units = std::map<uint32_t, std::vector<RecordPlace>>;
  std::map<std::string, Units, std::less<>> kinds_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_RECORD_MAP_H_
