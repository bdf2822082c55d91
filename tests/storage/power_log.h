// A log of writes and flushes of a few small files, which enumerates what the files can hold after
// a power loss: everything flushed, and any subset of the 512-byte sectors written since.
#ifndef ZEROSHARD_TESTS_STORAGE_POWER_LOG_H_
#define ZEROSHARD_TESTS_STORAGE_POWER_LOG_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"

namespace zeroshard {

using PowerFiles = std::vector<std::string>;

class PowerLog {
 public:
  static constexpr size_t kSector = 512;

  explicit PowerLog(PowerFiles files) : initial_(std::move(files)) {}

  void Write(size_t file, uint64_t offset, std::string_view bytes) {
    events_.push_back({Kind::kWrite, file, offset, std::string(bytes)});
  }
  void Flush(size_t file) { events_.push_back({Kind::kFlush, file, 0, {}}); }
  // Something happened that the world knows from then on.
  void Mark(uint64_t value) { events_.push_back({Kind::kMark, 0, value, {}}); }

  // Calls `visit` with the files and the last mark (or `mark`) for each state that can be found
  // after a power loss at any time of the log. Returns the number of states.
  uint64_t ForEachLoss(uint64_t mark,
                       absl::FunctionRef<void(const PowerFiles&, uint64_t mark)> visit) const {
    uint64_t states = 0;
    for (size_t end = 0; end <= events_.size(); ++end) {
      PowerFiles durable = initial_;
      std::vector<Sector> pending;
      uint64_t last_mark = mark;
      for (size_t i = 0; i < end; ++i) Apply(events_[i], durable, pending, last_mark);
      states += VisitSubsets(durable, pending, last_mark, visit);
    }
    return states;
  }

 private:
  enum class Kind { kWrite, kFlush, kMark };
  struct Event {
    Kind kind;
    size_t file;
    uint64_t offset;  // the mark, of a mark
    std::string bytes;
  };
  struct Sector {
    size_t file;
    uint64_t offset;
    std::string_view bytes;
  };

  static void Put(PowerFiles& files, const Sector& sector) {
    std::memcpy(files[sector.file].data() + sector.offset, sector.bytes.data(), kSector);
  }

  static void Apply(const Event& event, PowerFiles& durable, std::vector<Sector>& pending,
                    uint64_t& mark) {
    if (event.kind == Kind::kMark) mark = event.offset;
    if (event.kind == Kind::kWrite) {
      for (size_t at = 0; at < event.bytes.size(); at += kSector) {
        pending.push_back(
            {event.file, event.offset + at, std::string_view(event.bytes).substr(at, kSector)});
      }
    }
    if (event.kind != Kind::kFlush) return;
    std::vector<Sector> others;
    for (const Sector& sector : pending) {
      if (sector.file == event.file) {
        Put(durable, sector);
      } else {
        others.push_back(sector);
      }
    }
    pending = std::move(others);
  }

  // Sectors that change nothing are left out, which keeps the subsets few.
  static uint64_t VisitSubsets(const PowerFiles& durable, const std::vector<Sector>& pending,
                               uint64_t mark,
                               absl::FunctionRef<void(const PowerFiles&, uint64_t)> visit) {
    std::vector<Sector> differing;
    for (const Sector& sector : pending) {
      if (std::string_view(durable[sector.file]).substr(sector.offset, kSector) != sector.bytes) {
        differing.push_back(sector);
      }
    }
    for (uint64_t subset = 0; subset >> differing.size() == 0; ++subset) {
      PowerFiles files = durable;
      for (size_t i = 0; i < differing.size(); ++i) {
        if ((subset >> i & 1) != 0) Put(files, differing[i]);
      }
      visit(files, mark);
    }
    return uint64_t{1} << differing.size();
  }

  PowerFiles initial_;
  std::vector<Event> events_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_POWER_LOG_H_
