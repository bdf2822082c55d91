#include "device/cuda/registered_parts.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPage = 4096;

// In whole pages, in order, none touching another.
std::vector<HostPart> Merged(std::vector<HostPart> parts, uint64_t bytes) {
  std::erase_if(parts, [](const HostPart& part) { return part.begin >= part.end; });
  std::ranges::sort(parts, {}, &HostPart::begin);
  std::vector<HostPart> merged;
  for (const HostPart& part : parts) {
    const uint64_t begin = part.begin / kPage * kPage;
    const uint64_t end = std::min(bytes, (part.end + kPage - 1) / kPage * kPage);
    if (!merged.empty() && begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, end);
    } else {
      merged.push_back({begin, end});
    }
  }
  return merged;
}

}  // namespace

absl::StatusOr<RegisteredParts> RegisteredParts::Register(const CudaDevice& device,
                                                          std::span<std::byte> memory,
                                                          std::vector<HostPart> parts,
                                                          Access access,
                                                          absl::FunctionRef<void()> progress) {
  RegisteredParts registered;
  for (const HostPart& part : Merged(std::move(parts), memory.size())) {
    ZS_ASSIGN_OR_RETURN(RegisteredHost host,
                        RegisteredHost::Register(
                            device, memory.subspan(part.begin, part.end - part.begin), access));
    registered.pieces_.push_back({part.begin, std::move(host)});
    progress();
  }
  return registered;
}

DeviceAddress RegisteredParts::address(uint64_t offset) const {
  const auto after = std::ranges::upper_bound(pieces_, offset, {}, &Piece::begin);
  const Piece& piece = *std::prev(after);
  return piece.host.address() + (offset - piece.begin);
}

uint64_t RegisteredParts::RunEnd(uint64_t offset, uint64_t end) const {
  const auto after = std::ranges::upper_bound(pieces_, offset, {}, &Piece::begin);
  if (after != pieces_.begin()) {
    const Piece& piece = *std::prev(after);
    const uint64_t piece_end = piece.begin + piece.host.memory().size();
    if (offset < piece_end) return std::min(end, piece_end);
  }
  return after == pieces_.end() ? end : std::min(end, after->begin);
}

}  // namespace zeroshard
