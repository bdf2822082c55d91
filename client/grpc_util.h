// The few lines that turn gRPC's terms into ours. Only for the .cc files of client/ that speak
// gRPC.
#ifndef ZEROSHARD_CLIENT_GRPC_UTIL_H_
#define ZEROSHARD_CLIENT_GRPC_UTIL_H_

#include <grpcpp/channel.h>
#include <grpcpp/support/status.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard {

// The same code and text.
absl::Status FromGrpc(const grpc::Status& status);

// A channel over one connection to the Unix socket at `path`, without reconnection. Forked children
// do not hold the connection open. Errors as ConnectUnix.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& path,
                                                              absl::Duration timeout);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_GRPC_UTIL_H_
