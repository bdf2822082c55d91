#include "client/daemon_client.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/status.h"
#include "client/grpc_util.h"
#include "client/session.h"
#include "proto/trainer.grpc.pb.h"

namespace zeroshard {
namespace {

using trainer::v1::Trainer;

constexpr absl::Duration kConnectTimeout = absl::Seconds(10);
constexpr absl::Duration kLongestCall = absl::Hours(24);

// One unary call over a fresh connection. `method` is a member of the stub.
template <typename Request, typename Reply>
absl::StatusOr<Reply> Call(const std::string& socket,
                           grpc::Status (Trainer::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, Reply*),
                           const Request& request, absl::Duration timeout) {
  auto channel = ConnectChannel(socket, kConnectTimeout);
  if (!channel.ok()) {
    return Annotate(channel.status(), absl::StrCat("no daemon answers at ", socket,
                                                   "; start zeroshardd or set ZEROSHARD_SOCKET"));
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       absl::ToChronoMicroseconds(std::min(timeout, kLongestCall)));
  Trainer::Stub stub(*std::move(channel));
  Reply reply;
  const grpc::Status status = (stub.*method)(&context, request, &reply);
  if (!status.ok()) return FromGrpc(status);
  return reply;
}

}  // namespace

std::string DefaultSocketPath() {
  constexpr char kName[] = "zeroshard/zeroshardd.sock";
  if (auto path = Env("ZEROSHARD_SOCKET"); path && !path->empty()) return *std::move(path);
  if (geteuid() != 0) {
    if (auto folder = Env("XDG_RUNTIME_DIR"); folder && !folder->empty()) {
      return absl::StrCat(*folder, "/", kName);
    }
  }
  return absl::StrCat("/run/", kName);
}

DaemonClient::DaemonClient(std::string socket)
    : socket_(socket.empty() ? DefaultSocketPath() : std::move(socket)) {}

absl::StatusOr<trainer::v1::AttachReply> DaemonClient::Attach(
    const trainer::v1::AttachRequest& request, absl::Duration timeout) const {
  return Call(socket_, &Trainer::Stub::Attach, request, timeout);
}

absl::StatusOr<trainer::v1::DetachReply> DaemonClient::Detach(
    const trainer::v1::DetachRequest& request, absl::Duration timeout) const {
  return Call(socket_, &Trainer::Stub::Detach, request, timeout);
}

absl::StatusOr<trainer::v1::SaveReply> DaemonClient::Save(const trainer::v1::SaveRequest& request,
                                                          absl::Duration timeout) const {
  return Call(socket_, &Trainer::Stub::Save, request, timeout);
}

absl::StatusOr<trainer::v1::RestoreReply> DaemonClient::Restore(
    const trainer::v1::RestoreRequest& request, absl::Duration timeout) const {
  return Call(socket_, &Trainer::Stub::Restore, request, timeout);
}

absl::StatusOr<trainer::v1::ExportReply> DaemonClient::Export(
    const trainer::v1::ExportRequest& request, absl::Duration timeout) const {
  return Call(socket_, &Trainer::Stub::Export, request, timeout);
}

}  // namespace zeroshard
