// PowerLossLog: what was written and flushed, and every state of the disk after a loss of power.
//
// A write is safe once a sync of its file has ended that began after the write had ended. When
// power is lost all other writes may be there, be missing, or be torn: any of their 512-byte
// sectors may be there. Within a state, overlapping writes take effect in the order in which they
// began, so code that has overlapping writes in flight is not judged by this.
//
// Fed by a FaultyIoQueue with what it hands to the device. One thread.
#ifndef ZEROSHARD_TESTS_FAKES_POWER_LOSS_LOG_H_
#define ZEROSHARD_TESTS_FAKES_POWER_LOSS_LOG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroshard {

inline constexpr size_t kSectorBytes = 512;

class PowerLossLog {
 public:
  using FileId = std::pair<uint64_t, uint64_t>;  // device and inode
  static FileId IdOf(int fd);

  // Takes the file's contents now as safe. Before its first write.
  void Watch(int fd);

  uint64_t BeginWrite(int fd, uint64_t offset, std::span<const std::byte> data);
  uint64_t BeginSync(int fd);
  // The device has said that it is done. What failed is never ended.
  void End(uint64_t operation);

  // What the program has promised by now, for example that step `value` is committed.
  void Mark(uint64_t value);

  struct State {
    std::map<FileId, std::vector<std::byte>> files;
    uint64_t mark = 0;  // the last promise made before the loss
    std::string what;   // for messages
  };
  struct Options {
    size_t whole_subsets = 64;  // of writes, at each point; all there are, if that is not more
    size_t tears = 4;           // of each write, with and without the others
    uint64_t seed = 1;
  };

  // Calls `visit` with the states at every point where the set of possible ones is largest: before
  // each end of a sync, before each mark, and at the end. Returns how many there were.
  size_t ForEachState(const Options& options, const std::function<void(const State&)>& visit) const;

 private:
  enum class Kind : uint8_t { kBeginWrite, kBeginSync, kEnd, kMark };
  struct Event {
    Kind kind;
    uint64_t value = 0;  // of an end: the event that began; of a mark: its value
    FileId file = {};
    uint64_t offset = 0;
    std::vector<std::byte> data = {};
  };
  // Which sectors of a write are there; none given: all of them.
  struct Kept {
    size_t event;
    std::optional<std::vector<bool>> sectors = std::nullopt;
  };
  class Enumerator;

  struct Point {
    std::vector<size_t> safe;
    std::vector<size_t> open;
    uint64_t mark = 0;
    size_t event = 0;
  };
  Point PointBefore(size_t event) const;
  State Build(const Point& point, const std::vector<Kept>& kept, const std::string& what) const;

  std::map<FileId, std::vector<std::byte>> initial_;
  std::vector<Event> events_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_FAKES_POWER_LOSS_LOG_H_
