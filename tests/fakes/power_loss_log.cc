#include "tests/fakes/power_loss_log.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/unique_fd.h"
#include "storage/file_io.h"

namespace zeroshard {

PowerLossLog::FileId PowerLossLog::IdOf(int fd) {
  struct stat info = {};
  ZS_CHECK(::fstat(fd, &info) == 0, "stat of a watched file");
  return {info.st_dev, info.st_ino};
}

void PowerLossLog::Watch(int fd) {
  // Opened anew, because the descriptor may be for O_DIRECT.
  const std::string path = absl::StrCat("/proc/self/fd/", fd);
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const absl::StatusOr<uint64_t> size = RegularFileSize(file.get(), path);
  ZS_CHECK(size.ok(), "a watched file can be read");
  std::vector<std::byte> contents(*size);
  ZS_CHECK(ReadAllAt(file.get(), contents, 0, path).ok(), "a watched file can be read");
  initial_[IdOf(fd)] = std::move(contents);
}

uint64_t PowerLossLog::BeginWrite(int fd, uint64_t offset, std::span<const std::byte> data) {
  const FileId file = IdOf(fd);
  ZS_CHECK(initial_.contains(file), "files are watched before they are written");
  events_.push_back({Kind::kBeginWrite, 0, file, offset, {data.begin(), data.end()}});
  return events_.size() - 1;
}

uint64_t PowerLossLog::BeginSync(int fd) {
  events_.push_back({Kind::kBeginSync, 0, IdOf(fd)});
  return events_.size() - 1;
}

void PowerLossLog::End(uint64_t operation) { events_.push_back({Kind::kEnd, operation}); }

void PowerLossLog::Mark(uint64_t value) { events_.push_back({Kind::kMark, value}); }

PowerLossLog::Point PowerLossLog::PointBefore(size_t event) const {
  Point point;
  point.event = event;
  std::map<size_t, size_t> ended;                // event that began -> event that ended it
  std::vector<std::pair<FileId, size_t>> syncs;  // those that ended: file, where they began
  for (size_t i = 0; i < event; ++i) {
    const Event& now = events_[i];
    if (now.kind == Kind::kMark) point.mark = now.value;
    if (now.kind != Kind::kEnd) continue;
    ended[now.value] = i;
    if (events_[now.value].kind == Kind::kBeginSync) {
      syncs.emplace_back(events_[now.value].file, now.value);
    }
  }
  for (size_t i = 0; i < event; ++i) {
    if (events_[i].kind != Kind::kBeginWrite) continue;
    const auto end = ended.find(i);
    const bool safe = end != ended.end() && std::any_of(syncs.begin(), syncs.end(), [&](auto& s) {
                        return s.first == events_[i].file && s.second > end->second;
                      });
    (safe ? point.safe : point.open).push_back(i);
  }
  return point;
}

PowerLossLog::State PowerLossLog::Build(const Point& point, const std::vector<Kept>& kept,
                                        const std::string& what) const {
  std::vector<Kept> writes;
  for (const size_t event : point.safe) writes.push_back({event});
  writes.insert(writes.end(), kept.begin(), kept.end());
  std::sort(writes.begin(), writes.end(),
            [](const Kept& a, const Kept& b) { return a.event < b.event; });
  State state{initial_, point.mark, absl::StrCat("before event ", point.event, ": ", what)};
  for (const Kept& write : writes) {
    const Event& event = events_[write.event];
    std::vector<std::byte>& file = state.files[event.file];
    for (size_t begin = 0; begin < event.data.size(); begin += kSectorBytes) {
      if (write.sectors.has_value() && !(*write.sectors)[begin / kSectorBytes]) continue;
      const size_t end = std::min(begin + kSectorBytes, event.data.size());
      if (file.size() < event.offset + end) file.resize(event.offset + end);
      std::copy(event.data.begin() + begin, event.data.begin() + end,
                file.begin() + event.offset + begin);
    }
  }
  return state;
}

// The states of one point.
class PowerLossLog::Enumerator {
 public:
  Enumerator(const PowerLossLog& log, const Options& options, const Point& point,
             const std::function<void(const State&)>& visit)
      : log_(log), options_(options), point_(point), visit_(visit), random_(options.seed) {}

  size_t Run() {
    Subsets();
    for (size_t i = 0; i < point_.open.size(); ++i) {
      for (size_t tear = 0; tear < options_.tears; ++tear) Tear(i, tear);
    }
    return states_;
  }

 private:
  void Visit(const std::vector<Kept>& kept, const std::string& what) {
    ++states_;
    visit_(log_.Build(point_, kept, what));
  }

  void Subset(const std::function<bool(size_t)>& is_kept) {
    std::vector<Kept> kept;
    std::string what = "whole writes";
    for (size_t i = 0; i < point_.open.size(); ++i) {
      if (!is_kept(i)) continue;
      kept.push_back({point_.open[i]});
      absl::StrAppend(&what, " ", point_.open[i]);
    }
    Visit(kept, what);
  }

  void Subsets() {
    const size_t count = point_.open.size();
    if (count < 20 && (size_t{1} << count) <= options_.whole_subsets) {
      for (size_t bits = 0; bits < size_t{1} << count; ++bits) {
        Subset([bits](size_t i) { return ((bits >> i) & 1) != 0; });
      }
      return;
    }
    Subset([](size_t) { return false; });
    Subset([](size_t) { return true; });
    for (size_t n = 0; n < count; ++n) {
      Subset([n](size_t i) { return i == n; });
      Subset([n](size_t i) { return i != n; });
    }
    for (size_t n = 0; n < options_.whole_subsets; ++n) {
      Subset([this](size_t) { return random_() % 2 == 0; });
    }
  }

  // Write `torn` of the open ones in part, with none and with all of the others: its first sectors,
  // its last ones, or any.
  void Tear(size_t torn, size_t tear) {
    const size_t bytes = log_.events_[point_.open[torn]].data.size();
    const size_t sectors = (bytes + kSectorBytes - 1) / kSectorBytes;
    if (sectors < 2) return;
    const size_t cut = 1 + random_() % (sectors - 1);
    std::vector<bool> mask(sectors);
    for (size_t i = 0; i < sectors; ++i) {
      mask[i] = tear % 3 == 0 ? i < cut : tear % 3 == 1 ? i >= cut : random_() % 2 == 0;
    }
    for (const bool others : {false, true}) {
      std::vector<Kept> kept = {{point_.open[torn], mask}};
      for (size_t i = 0; others && i < point_.open.size(); ++i) {
        if (i != torn) kept.push_back({point_.open[i]});
      }
      Visit(kept, absl::StrCat("write ", point_.open[torn], " torn near sector ", cut,
                               others ? ", all others there" : ", no others"));
    }
  }

  const PowerLossLog& log_;
  const Options& options_;
  const Point& point_;
  const std::function<void(const State&)>& visit_;
  std::mt19937_64 random_;
  size_t states_ = 0;
};

size_t PowerLossLog::ForEachState(const Options& options,
                                  const std::function<void(const State&)>& visit) const {
  size_t states = 0;
  for (size_t i = 0; i <= events_.size(); ++i) {
    const bool at_end = i == events_.size();
    const bool largest =
        at_end || events_[i].kind == Kind::kMark ||
        (events_[i].kind == Kind::kEnd && events_[events_[i].value].kind == Kind::kBeginSync);
    if (!largest) continue;
    const Point point = PointBefore(i);
    states += Enumerator(*this, options, point, visit).Run();
  }
  return states;
}

}  // namespace zeroshard
