// absl::Status to grpc::Status: the codes are the same, the message is cut to what a trailer can
// carry.

#ifndef ZEROSHARD_SERVER_GRPC_STATUS_H_
#define ZEROSHARD_SERVER_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace zeroshard {

inline grpc::Status ToGrpc(const absl::Status& status) {
  // gRPC takes 8 KiB of metadata by default, and escapes every byte that is not printable by three.
  constexpr size_t kMaxMessage = 2500;
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kMaxMessage) message = message.substr(0, kMaxMessage) + " ...";
  return {static_cast<grpc::StatusCode>(status.code()), message};
}

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_GRPC_STATUS_H_
