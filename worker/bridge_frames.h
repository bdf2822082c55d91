// The frames between bridges (worker/bridge.h) and the bytes inside them. Workers of one job run
// one build, which the rendezvous checks, so plain structs travel as they are. docs/bridge.md.
#ifndef ZEROSHARD_WORKER_BRIDGE_FRAMES_H_
#define ZEROSHARD_WORKER_BRIDGE_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/board.h"
#include "transport/mesh.h"

namespace zeroshard {

enum class BridgeFrame : uint32_t {
  kOrder = 1,        // index: rank, tag: attempt, value: first index; payload: units
  kArrival = 2,      // index: rank, tag: attempt; payload: StepInput
  kPut = 3,          // index: rank, tag: put tag, value: unit; payload: offset, elements, values
  kPutDone = 4,      // index: rank, tag: put tag
  kPartial = 5,      // index: unit, tag: Tag; payload: partial sums
  kMerged = 6,       // index: unit, tag: Tag
  kInitialized = 7,  // index: unit
  kPull = 8,         // index: unit, tag: number, value: epoch; payload: puts seen, by rank; attempt
  kShard = 9,        // index: unit, tag and value: of the pull (0: resident); payload: the shard
  kReady = 10,       // tag: attempt; payload: ExactSum
  kApplied = 11,     // tag: attempt
  kDecision = 12,    // tag: attempt; payload: DecisionBytes
  kPoison = 13,      // tag: generation of the last drop, value: status code; payload: text
  kDrop = 14,        // tag: drop_until, value: drop_after; payload: drop_generation
  kContribution = 15,  // index: unit, tag: Tag, value: rank; payload: presence
  kMicroEnd = 16,      // index: rank, tag: Tag
};

// Before each partial sum of a kPartial. A multiple of 64 bytes, as the sums are, so that these can
// be added from where they came.
struct PartialHeader {
  uint8_t any = 0;  // whether a sum follows
  uint8_t dtype = 0;
  uint8_t reserved0[2] = {};
  float weight = 1.0f;
  uint64_t reserved1[7] = {};
  Presence present = {};
};
static_assert(sizeof(PartialHeader) % 64 == 0);

// Appends the bytes of plain values.
class ByteWriter {
 public:
  // Room for so many bytes in all; more are copied when they come.
  void Reserve(size_t bytes) { out_.reserve(bytes); }
  template <typename T>
  void Value(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    Bytes({reinterpret_cast<const std::byte*>(&value), sizeof(T)});
  }
  void Bytes(std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(Extend(bytes.size()), bytes.data(), bytes.size());
  }
  // Room for bytes that the caller fills.
  std::byte* Extend(size_t bytes) {
    out_.resize(out_.size() + bytes);
    return out_.data() + out_.size() - bytes;
  }
  FrameBytes Take() { return std::move(out_); }

 private:
  FrameBytes out_;
};

// Reads them back; a short read makes every later one fail.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  bool Value(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::span<const std::byte> bytes = Bytes(sizeof(T));
    if (bytes.size() != sizeof(T)) return false;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return true;
  }
  // Empty when fewer are left.
  std::span<const std::byte> Bytes(size_t count) {
    if (count > bytes_.size()) {
      bytes_ = {};
      return {};
    }
    const std::span<const std::byte> result = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return result;
  }
  size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_BRIDGE_FRAMES_H_
