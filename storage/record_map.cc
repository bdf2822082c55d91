#include "storage/record_map.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/file_io.h"

namespace zeroshard {
namespace {

std::string Describe(uint32_t unit, std::string_view kind, GrainRange range) {
  return absl::StrCat(Abs(kind), " of unit ", unit, ", grains [", range.begin, ", ", range.end,
                      ")");
}

}  // namespace

absl::Status RecordMap::Add(size_t shard, std::span<const ShardRecord> records,
                            const Layout& layout, const std::string& path) {
  for (const ShardRecord& record : records) {
    const bool inside = record.unit < layout.units().size() &&
                        record.grains.end <= layout.units()[record.unit].grains;
    if (!inside) {
      return CorruptAt(
          path, record.offset,
          Describe(record.unit, record.kind, record.grains) + ": the layout has no such grains");
    }
    kinds_[record.kind][record.unit].push_back({shard, record});
  }
  return absl::OkStatus();
}

absl::Status RecordMap::Seal() {
  for (auto& [kind, units] : kinds_) {
    for (auto& [unit, places] : units) {
      std::sort(places.begin(), places.end(), [](const RecordPlace& a, const RecordPlace& b) {
        return a.record.grains.begin < b.record.grains.begin;
      });
      for (size_t i = 1; i < places.size(); ++i) {
        const ShardRecord& record = places[i].record;
        if (record.grains.begin < places[i - 1].record.grains.end) {
          return absl::DataLossError(
              absl::StrCat(Describe(unit, kind, record.grains), " are stored twice"));
        }
        if (!(record.type == places[0].record.type)) {
          return absl::DataLossError(absl::StrCat(Describe(unit, kind, record.grains),
                                                  " have another data type than others"));
        }
      }
    }
  }
  return absl::OkStatus();
}

std::span<const RecordPlace> RecordMap::Find(uint32_t unit, std::string_view kind) const {
  const auto units = kinds_.find(kind);
  if (units == kinds_.end()) return {};
  const auto places = units->second.find(unit);
  if (places == units->second.end()) return {};
  return places->second;
}

absl::StatusOr<std::span<const RecordPlace>> RecordMap::Cover(uint32_t unit, std::string_view kind,
                                                              GrainRange range) const {
  std::span<const RecordPlace> places = Find(unit, kind);
  if (range.begin >= range.end) return std::span<const RecordPlace>();
  if (places.empty()) {
    return absl::NotFoundError(absl::StrCat("the checkpoint has no ", Describe(unit, kind, range)));
  }
  const auto first = std::partition_point(
      places.begin(), places.end(),
      [&](const RecordPlace& place) { return place.record.grains.end <= range.begin; });
  uint64_t next = range.begin;
  auto last = first;
  while (next < range.end) {
    if (last == places.end() || last->record.grains.begin > next) {
      return absl::DataLossError(
          absl::StrCat("no shard holds grain ", next, " of ", Describe(unit, kind, range)));
    }
    next = last->record.grains.end;
    ++last;
  }
  return std::span<const RecordPlace>(first, last);
}

std::vector<std::string> RecordMap::Kinds() const {
  std::vector<std::string> kinds;
  for (const auto& [kind, units] : kinds_) kinds.push_back(kind);
  return kinds;
}

std::vector<const RecordPlace*> RecordMap::All() const {
  std::vector<const RecordPlace*> all;
  for (const auto& [kind, units] : kinds_) {
    for (const auto& [unit, places] : units) {
      for (const RecordPlace& place : places) all.push_back(&place);
    }
  }
  return all;
}

}  // namespace zeroshard
