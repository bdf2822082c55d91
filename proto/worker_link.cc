#include "proto/worker_link.h"

#include <google/protobuf/message_lite.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fd_passing.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

constexpr uint32_t kMagic = 0x4c57535a;  // "ZSWL"
constexpr uint32_t kBodyInMemfd = 1;
constexpr uint32_t kContinuation = 2;
constexpr size_t kInlineBytes = 32 * 1024;

struct PacketHeader {
  uint32_t magic = kMagic;
  uint32_t flags = 0;
  uint64_t body_bytes = 0;
  uint32_t total_fds = 0;
  uint32_t packet_fds = 0;
};
static_assert(sizeof(PacketHeader) == 24);

std::string PacketBytes(const PacketHeader& header, std::string_view body) {
  std::string bytes(sizeof(header), '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  bytes.append(body);
  return bytes;
}

absl::StatusOr<UniqueFd> BytesToMemfd(std::string_view bytes, std::string_view name) {
  // A memfd is never empty: one byte of slack, and readers use the length that came beside it.
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, CreateSealedMemfd(name, bytes.size() + 1));
  ZS_ASSIGN_OR_RETURN(MappedRegion map,
                      MappedRegion::Map(fd.get(), bytes.size() + 1, Access::kReadWrite));
  std::memcpy(map.data(), bytes.data(), bytes.size());
  return fd;
}

absl::StatusOr<std::string> MemfdToBytes(int fd, uint64_t bytes) {
  if (bytes > kMaxLinkBodyBytes) {
    return absl::DataLossError(absl::StrCat("link message of ", bytes, " bytes"));
  }
  ZS_RETURN_IF_ERROR(VerifySealed(fd, bytes + 1));
  ZS_ASSIGN_OR_RETURN(MappedRegion map, MappedRegion::Map(fd, bytes + 1, Access::kReadOnly));
  return std::string(reinterpret_cast<const char*>(map.data()), bytes);
}

absl::StatusOr<PacketHeader> ParseHeader(const Message& packet) {
  PacketHeader header;
  if (packet.bytes.size() < sizeof(header)) {
    return absl::DataLossError(
        absl::StrCat("link packet of ", packet.bytes.size(), " bytes is shorter than its header"));
  }
  std::memcpy(&header, packet.bytes.data(), sizeof(header));
  const size_t extra = (header.flags & kBodyInMemfd) != 0 ? 1 : 0;
  if (header.magic != kMagic || header.body_bytes > kMaxLinkBodyBytes ||
      header.total_fds > kMaxLinkFds || packet.fds.size() != header.packet_fds + extra) {
    return absl::DataLossError("link packet with a malformed header");
  }
  return header;
}

absl::StatusOr<std::string> TakeBody(const PacketHeader& header, Message& packet) {
  if ((header.flags & kBodyInMemfd) != 0) {
    UniqueFd memfd = std::move(packet.fds.front());
    packet.fds.erase(packet.fds.begin());
    return MemfdToBytes(memfd.get(), header.body_bytes);
  }
  if (packet.bytes.size() - sizeof(header) != header.body_bytes) {
    return absl::DataLossError("link packet whose body has another length than its header says");
  }
  return packet.bytes.substr(sizeof(header));
}

}  // namespace

absl::Status SendLinkMessage(int socket, std::string_view body, std::span<const int> fds,
                             absl::Duration timeout) {
  if (body.size() > kMaxLinkBodyBytes || fds.size() > kMaxLinkFds) {
    return absl::InvalidArgumentError(
        absl::StrCat("link message of ", body.size(), " bytes, ", fds.size(), " descriptors"));
  }
  PacketHeader header;
  header.body_bytes = body.size();
  header.total_fds = static_cast<uint32_t>(fds.size());
  UniqueFd memfd;
  std::vector<int> packet_fds;
  if (body.size() > kInlineBytes) {
    ZS_ASSIGN_OR_RETURN(memfd, BytesToMemfd(body, "zeroshard:link"));
    packet_fds.push_back(memfd.get());
    header.flags = kBodyInMemfd;
    body = {};
  }
  size_t sent = 0;
  do {
    const size_t n = std::min(kMaxFdsPerMessage - packet_fds.size(), fds.size() - sent);
    header.packet_fds = static_cast<uint32_t>(n);
    packet_fds.insert(packet_fds.end(), fds.begin() + sent, fds.begin() + sent + n);
    ZS_RETURN_IF_ERROR(SendMessage(socket, PacketBytes(header, body), packet_fds, timeout));
    sent += n;
    packet_fds.clear();
    body = {};
    header.flags = kContinuation;
    header.body_bytes = 0;
  } while (sent < fds.size());
  return absl::OkStatus();
}

absl::StatusOr<LinkMessage> ReceiveLinkMessage(int socket, absl::Duration timeout) {
  ZS_ASSIGN_OR_RETURN(Message packet, ReceiveMessage(socket, timeout));
  ZS_ASSIGN_OR_RETURN(const PacketHeader first, ParseHeader(packet));
  if ((first.flags & kContinuation) != 0) {
    return absl::DataLossError("link message that starts with a continuation");
  }
  LinkMessage message;
  ZS_ASSIGN_OR_RETURN(message.body, TakeBody(first, packet));
  message.fds = std::move(packet.fds);
  while (message.fds.size() < first.total_fds) {
    ZS_ASSIGN_OR_RETURN(Message more, ReceiveMessage(socket, timeout));
    ZS_ASSIGN_OR_RETURN(const PacketHeader header, ParseHeader(more));
    if (header.flags != kContinuation || more.fds.empty()) {
      return absl::DataLossError("link message whose continuation is missing");
    }
    for (UniqueFd& fd : more.fds) message.fds.push_back(std::move(fd));
  }
  if (message.fds.size() != first.total_fds) {
    return absl::DataLossError("link message with more descriptors than announced");
  }
  return message;
}

absl::StatusOr<UniqueFd> ToMemfd(const google::protobuf::MessageLite& message,
                                 std::string_view name) {
  return BytesToMemfd(message.SerializeAsString(), name);
}

absl::Status FromMemfd(int fd, google::protobuf::MessageLite* message) {
  ZS_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(fd));
  if (bytes == 0) return absl::DataLossError("empty memfd where a message was expected");
  ZS_ASSIGN_OR_RETURN(const std::string body, MemfdToBytes(fd, bytes - 1));
  if (!message->ParseFromString(body)) {
    return absl::DataLossError(
        absl::StrCat("memfd of ", bytes, " bytes holds no ", message->GetTypeName()));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
