// The framing of proto/internal.proto on the SOCK_SEQPACKET socket that links a server and one
// worker.
//
// A message is a body and any number of descriptors. On the socket it is one or more packets, each
// a 24-byte header, at most 32 KiB of body and at most kMaxFdsPerMessage descriptors:
//
//   packet  = magic:u32 flags:u32 body_bytes:u64 total_fds:u32 packet_fds:u32 body?
//   flags   = 1: the body lies in a memfd, the first descriptor of the first packet (not counted in
//                total_fds); 2: a continuation, which brings further descriptors of the same
//                message
//
// All numbers are in the machine's byte order: both ends run on one node, from one build. A message
// is sent by one thread at a time and received by one thread at a time; the two directions are
// independent. Errors: Unavailable when the peer is gone, DataLoss when the stream does not follow
// the grammar (the link is then unusable), DeadlineExceeded.

#ifndef ZEROSHARD_PROTO_WORKER_LINK_H_
#define ZEROSHARD_PROTO_WORKER_LINK_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace google::protobuf {
class MessageLite;
}

namespace zeroshard {

// The descriptor number of a worker's end of its link.
inline constexpr int kWorkerLinkFd = 3;

// Bounds of one message: a manifest of a million parameters fits.
inline constexpr uint64_t kMaxLinkBodyBytes = uint64_t{1} << 30;
inline constexpr uint32_t kMaxLinkFds = 64 * 1024;

struct LinkMessage {
  std::string body;
  std::vector<UniqueFd> fds;  // close-on-exec
};

// Sends one message; the caller keeps the descriptors.
absl::Status SendLinkMessage(int socket, std::string_view body, std::span<const int> fds,
                             absl::Duration timeout);

// The next message, whole. `timeout` bounds the wait for every packet.
absl::StatusOr<LinkMessage> ReceiveLinkMessage(int socket, absl::Duration timeout);

// A serialised message in a sealed memfd, and back. For WorkerStart.
absl::StatusOr<UniqueFd> ToMemfd(const google::protobuf::MessageLite& message,
                                 std::string_view name);
absl::Status FromMemfd(int fd, google::protobuf::MessageLite* message);

}  // namespace zeroshard

#endif  // ZEROSHARD_PROTO_WORKER_LINK_H_
