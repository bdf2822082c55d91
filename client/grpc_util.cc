#include "client/grpc_util.h"

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/support/channel_arguments.h>

#include "base/fd_passing.h"
#include "base/status.h"
#include "client/fork_guard.h"

namespace zeroshard {
namespace {

// Messages carry a user_state or a manifest, never tensors.
constexpr int kMaxMessage = 256 << 20;

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& path,
                                                              absl::Duration timeout) {
  ZS_ASSIGN_OR_RETURN(UniqueFd socket, ConnectUnix(path, timeout, UnixSocketType::kStream));
  CloseInForkedChildren(socket.get());
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessage);
  arguments.SetMaxSendMessageSize(kMaxMessage);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomInsecureChannelFromFd("localhost", socket.release(), arguments);
}

}  // namespace zeroshard
