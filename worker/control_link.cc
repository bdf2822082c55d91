#include "worker/control_link.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "proto/worker_link.h"

namespace zeroshard {
namespace {

// The server reads its links from one thread that never blocks for long; past this it is gone.
constexpr absl::Duration kSendTimeout = absl::Seconds(30);

}  // namespace

absl::StatusOr<ControlLink::Start> ControlLink::ReceiveStart(absl::Duration timeout) {
  ZS_ASSIGN_OR_RETURN(Command first, Receive(timeout));
  if (!first.message.has_start() || first.fds.empty()) {
    return absl::DataLossError("the first message of the server is not a Start");
  }
  Start result;
  ZS_RETURN_IF_ERROR(FromMemfd(first.fds.front().get(), &result.start));
  if (first.fds.size() != 1 + static_cast<size_t>(result.start.regions_size())) {
    return absl::DataLossError(absl::StrCat("Start names ", result.start.regions_size(),
                                            " regions but brought ", first.fds.size() - 1));
  }
  result.regions.reserve(first.fds.size() - 1);
  for (size_t i = 1; i < first.fds.size(); ++i) result.regions.push_back(std::move(first.fds[i]));
  return result;
}

absl::StatusOr<ControlLink::Command> ControlLink::Receive(absl::Duration timeout) {
  ZS_ASSIGN_OR_RETURN(LinkMessage message, ReceiveLinkMessage(socket_.get(), timeout));
  Command command;
  if (!command.message.ParseFromString(message.body)) {
    return absl::DataLossError("a message of the server does not parse");
  }
  command.fds = std::move(message.fds);
  return command;
}

absl::Status ControlLink::Send(const internal::v1::FromWorker& message,
                               const std::vector<int>& fds) {
  absl::MutexLock lock(&send_mu_);
  return SendLinkMessage(socket_.get(), message.SerializeAsString(), fds, kSendTimeout);
}

}  // namespace zeroshard
