#include "storage/journal_frame.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/checksum.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/bytes.h"
#include "storage/file_io.h"
#include "storage/journal.h"

namespace zeroshard::journal_frame {
namespace {

constexpr std::string_view kFileMagic = "ZSJOURN1";
constexpr uint32_t kVersion = 1;
constexpr uint32_t kFrameMagic = 0x524A535A;  // "ZSJR"
constexpr size_t kFrameHeader = 32;
constexpr size_t kChecksum = 8;

uint64_t FrameBytes(uint64_t length) {
  return RoundUpTo(kFrameHeader + length + kChecksum, kSector);
}

void AppendChecksum(std::string& bytes) { AppendInteger(bytes, Xxh3_64(bytes)); }

// Whether the last 8 bytes are the checksum of those before them.
bool ChecksumHolds(std::string_view bytes) {
  const size_t covered = bytes.size() - kChecksum;
  return IntegerAt<uint64_t>(bytes, covered) == Xxh3_64(bytes.substr(0, covered));
}

absl::StatusOr<std::string> ReadBytes(int fd, uint64_t offset, uint64_t bytes,
                                      const std::string& path) {
  std::string data(bytes, '\0');
  ZS_RETURN_IF_ERROR(ReadAllAt(fd, std::as_writable_bytes(std::span<char>(data)), offset, path));
  return data;
}

bool AllZero(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char c) { return c == 0; });
}

bool HasZeroSector(std::string_view frame) {
  for (size_t offset = 0; offset < frame.size(); offset += kSector) {
    if (AllZero(frame.substr(offset, kSector))) return true;
  }
  return false;
}

// Whether a sector after `place` begins with the header of a later frame.
absl::StatusOr<bool> IsFollowedByFrame(int fd, const Place& place, const std::string& path) {
  for (uint64_t offset = place.offset + kSector; offset + kFrameHeader <= place.file_bytes;
       offset += kSector) {
    ZS_ASSIGN_OR_RETURN(const std::string head, ReadBytes(fd, offset, kFrameHeader, path));
    const bool is_frame = IntegerAt<uint32_t>(head, 0) == kFrameMagic && ChecksumHolds(head) &&
                          IntegerAt<uint64_t>(head, 16) == place.id;
    if (is_frame) return true;
  }
  return false;
}

// What is wrong with the 32 bytes at the beginning of a frame; empty for nothing.
std::string_view FaultOfFrameHeader(std::string_view head, const Place& place) {
  if (IntegerAt<uint32_t>(head, 0) != kFrameMagic) return "no record begins here";
  if (!ChecksumHolds(head)) return "the checksum of the record's header is wrong";
  if (IntegerAt<uint64_t>(head, 16) != place.id) return "the record is of another journal";
  if (IntegerAt<uint64_t>(head, 8) != place.sequence) return "the record is out of order";
  const uint32_t length = IntegerAt<uint32_t>(head, 4);
  if (length == 0 || length > kMaxJournalPayload) return "the record's length is impossible";
  return {};
}

}  // namespace

std::string_view Frame::payload() const {
  return std::string_view(bytes).substr(kFrameHeader, length);
}

std::string EncodeHeader(const Header& header) {
  std::string bytes(kFileMagic);
  AppendInteger(bytes, kVersion);
  AppendInteger(bytes, uint32_t{0});
  AppendInteger(bytes, header.id);
  AppendInteger(bytes, header.first_sequence);
  bytes.resize(kSector - kChecksum, '\0');
  AppendChecksum(bytes);
  return bytes;
}

absl::StatusOr<Header> ReadHeader(int fd, uint64_t file_bytes, const std::string& path) {
  const uint64_t present = std::min(file_bytes, kSector);
  ZS_ASSIGN_OR_RETURN(std::string bytes, ReadBytes(fd, 0, present, path));
  // The header is written before the file gets its name, so that it cannot be torn.
  if (present < kSector) return CorruptAt(path, present, "the journal's header is cut off");
  if (!ChecksumHolds(bytes)) {
    if (!std::string_view(bytes).starts_with(kFileMagic)) {
      return absl::InvalidArgumentError(absl::StrCat(path, " is not a journal"));
    }
    return CorruptAt(path, 0, "the checksum of the journal's header is wrong");
  }
  const uint32_t version = IntegerAt<uint32_t>(bytes, kFileMagic.size());
  if (!std::string_view(bytes).starts_with(kFileMagic) || version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is a journal of version ", version,
                                                   ", this program reads version ", kVersion));
  }
  return Header{IntegerAt<uint64_t>(bytes, 16), IntegerAt<uint64_t>(bytes, 24)};
}

std::string EncodeFrame(uint64_t id, uint64_t sequence, std::string_view payload) {
  const uint64_t frame_bytes = FrameBytes(payload.size());
  std::string bytes;
  bytes.reserve(frame_bytes);
  AppendInteger(bytes, kFrameMagic);
  AppendInteger(bytes, static_cast<uint32_t>(payload.size()));
  AppendInteger(bytes, sequence);
  AppendInteger(bytes, id);
  AppendChecksum(bytes);
  bytes.append(payload);
  bytes.resize(frame_bytes - kChecksum, '\0');
  AppendChecksum(bytes);
  return bytes;
}

absl::StatusOr<std::optional<Frame>> ReadFrame(int fd, const Place& place,
                                               const std::string& path) {
  const uint64_t left = place.file_bytes - place.offset;
  if (left < kFrameHeader) return std::nullopt;
  ZS_ASSIGN_OR_RETURN(std::string head, ReadBytes(fd, place.offset, kFrameHeader, path));
  if (std::string_view fault = FaultOfFrameHeader(head, place); !fault.empty()) {
    // The first sector of a frame that was being written may be the one that is missing.
    if (AllZero(head) && left <= FrameBytes(kMaxJournalPayload)) {
      ZS_ASSIGN_OR_RETURN(const bool followed, IsFollowedByFrame(fd, place, path));
      if (!followed) return std::nullopt;
    }
    return CorruptAt(path, place.offset, fault);
  }
  Frame frame;
  frame.length = IntegerAt<uint32_t>(head, 4);
  const uint64_t frame_bytes = FrameBytes(frame.length);
  if (left < frame_bytes) return std::nullopt;
  ZS_ASSIGN_OR_RETURN(frame.bytes, ReadBytes(fd, place.offset, frame_bytes, path));
  if (ChecksumHolds(frame.bytes)) return frame;
  if (left == frame_bytes && HasZeroSector(frame.bytes)) return std::nullopt;
  return CorruptAt(path, place.offset, "the checksum of the record is wrong");
}

}  // namespace zeroshard::journal_frame
