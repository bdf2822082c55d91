// The bytes of a journal: header and frames, encoded and checked. Pure but for the reads of
// ReadFrame. Format page: docs/journal.md.
#ifndef ZEROSHARD_STORAGE_JOURNAL_FRAME_H_
#define ZEROSHARD_STORAGE_JOURNAL_FRAME_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace zeroshard::journal_frame {

inline constexpr uint64_t kSector = 512;

struct Header {
  uint64_t id = 0;
  uint64_t first_sequence = 0;
};

// kSector bytes.
std::string EncodeHeader(const Header& header);

// Reads the header of a file of `file_bytes`. DataLoss when it is damaged, InvalidArgument for
// another kind or version of file.
absl::StatusOr<Header> ReadHeader(int fd, uint64_t file_bytes, const std::string& path);

std::string EncodeFrame(uint64_t id, uint64_t sequence, std::string_view payload);

struct Frame {
  std::string bytes;    // all of it
  uint64_t length = 0;  // of the payload
  std::string_view payload() const;
};

// Where a frame must be and what it must carry.
struct Place {
  uint64_t id = 0;
  uint64_t sequence = 0;
  uint64_t offset = 0;  // < file_bytes
  uint64_t file_bytes = 0;
};

// The frame at `place`; nothing when it is torn, that is, when all from there to the end of the
// file was never acknowledged; DataLoss when it is corrupt.
absl::StatusOr<std::optional<Frame>> ReadFrame(int fd, const Place& place, const std::string& path);

}  // namespace zeroshard::journal_frame

#endif  // ZEROSHARD_STORAGE_JOURNAL_FRAME_H_
