#include "client/daemon_client.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/config.h"
#include "base/status.h"
#include "client/grpc_util.h"
#include "client/session.h"
#include "proto/trainer.grpc.pb.h"

namespace zeroshard {
namespace {

using trainer::v1::Trainer;

constexpr absl::Duration kConnectTimeout = absl::Seconds(10);
constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr absl::Duration kLongestCall = absl::Hours(24);

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

DaemonClient::DaemonClient(std::string socket, std::function<bool()> interrupted)
    : socket_(socket.empty() ? DefaultSocketPath() : std::move(socket)),
      interrupted_(std::move(interrupted)) {}

template <typename Reply, typename Request, typename Start>
absl::StatusOr<Reply> DaemonClient::Call(Start start, const Request& request,
                                         absl::Duration timeout) const {
  auto channel = ConnectChannel(socket_, kConnectTimeout);
  if (!channel.ok()) {
    return Annotate(channel.status(), absl::StrCat("no daemon answers at ", socket_,
                                                   "; start zeroshardd or set ZEROSHARD_SOCKET"));
  }
  Trainer::Stub stub(*std::move(channel));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       absl::ToChronoMicroseconds(std::min(timeout, kLongestCall)));
  Reply reply;
  grpc::Status status;
  absl::Notification done;
  start(stub.async(), &context, &request, &reply,
        std::function<void(grpc::Status)>([&](grpc::Status result) {
          status = std::move(result);
          done.Notify();
        }));
  bool cancelled = false;
  while (!done.WaitForNotificationWithTimeout(kSlice)) {
    if (cancelled || !interrupted_ || !interrupted_()) continue;
    cancelled = true;
    context.TryCancel();
  }
  if (!status.ok()) return FromGrpc(status);
  return reply;
}

absl::StatusOr<trainer::v1::AttachReply> DaemonClient::Attach(
    const trainer::v1::AttachRequest& request, absl::Duration timeout) const {
  return Call<trainer::v1::AttachReply>(
      [](auto* stub, auto... arguments) { stub->Attach(std::move(arguments)...); }, request,
      timeout);
}

absl::StatusOr<trainer::v1::DetachReply> DaemonClient::Detach(
    const trainer::v1::DetachRequest& request, absl::Duration timeout) const {
  return Call<trainer::v1::DetachReply>(
      [](auto* stub, auto... arguments) { stub->Detach(std::move(arguments)...); }, request,
      timeout);
}

absl::StatusOr<trainer::v1::SaveReply> DaemonClient::Save(const trainer::v1::SaveRequest& request,
                                                          absl::Duration timeout) const {
  return Call<trainer::v1::SaveReply>(
      [](auto* stub, auto... arguments) { stub->Save(std::move(arguments)...); }, request, timeout);
}

absl::StatusOr<trainer::v1::RestoreReply> DaemonClient::Restore(
    const trainer::v1::RestoreRequest& request, absl::Duration timeout) const {
  return Call<trainer::v1::RestoreReply>(
      [](auto* stub, auto... arguments) { stub->Restore(std::move(arguments)...); }, request,
      timeout);
}

absl::StatusOr<trainer::v1::ExportReply> DaemonClient::Export(
    const trainer::v1::ExportRequest& request, absl::Duration timeout) const {
  return Call<trainer::v1::ExportReply>(
      [](auto* stub, auto... arguments) { stub->Export(std::move(arguments)...); }, request,
      timeout);
}

absl::StatusOr<trainer::v1::RendezvousReply> DaemonClient::Rendezvous(
    const trainer::v1::RendezvousRequest& request, absl::Duration timeout) const {
  return Call<trainer::v1::RendezvousReply>(
      [](auto* stub, auto... arguments) { stub->Rendezvous(std::move(arguments)...); }, request,
      timeout);
}

}  // namespace zeroshard
