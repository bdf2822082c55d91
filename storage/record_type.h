// What the values of a checkpoint's record are: a data type, or one of the two parts of 8-bit
// states.
#ifndef ZEROSHARD_STORAGE_RECORD_TYPE_H_
#define ZEROSHARD_STORAGE_RECORD_TYPE_H_

#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "storage/block_table.h"
#include "storage/layout.h"

namespace zeroshard {

class RecordType {
 public:
  // One value an element. Implicit: most records are these.
  constexpr RecordType(DType dtype)  // NOLINT(google-explicit-constructor)
      : value_(static_cast<uint8_t>(dtype)) {}
  // One code byte an element.
  static constexpr RecordType Codes() { return RecordType(kCodes); }
  // kMaxGrainBlocks fp32 a grain: the scale of the block that begins at element 16 * k of the grain
  // at place k, 0 where none does.
  static constexpr RecordType Scales() { return RecordType(kScales); }

  // Whether a number read from a file is one; the numbers are never changed.
  static constexpr bool IsValid(uint32_t value) { return value <= kScales; }
  static constexpr RecordType FromNumber(uint8_t value) { return RecordType(value); }
  constexpr uint8_t number() const { return value_; }

  // Bytes of one grain of it.
  constexpr uint64_t grain_bytes() const {
    if (value_ == kCodes) return kGrainElements;
    if (value_ == kScales) return kMaxGrainBlocks * sizeof(float);
    return kGrainElements * SizeOf(static_cast<DType>(value_));
  }
  constexpr std::string_view name() const {
    if (value_ == kCodes) return "8-bit codes";
    if (value_ == kScales) return "scales of 8-bit codes";
    return DTypeName(static_cast<DType>(value_));
  }
  friend constexpr bool operator==(RecordType a, RecordType b) { return a.value_ == b.value_; }

 private:
  static constexpr uint8_t kCodes = 3;
  static constexpr uint8_t kScales = 4;
  explicit constexpr RecordType(uint8_t value) : value_(value) {}
  uint8_t value_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_RECORD_TYPE_H_
