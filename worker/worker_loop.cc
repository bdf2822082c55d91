#include "worker/worker_loop.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "worker/shard_files.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr absl::Duration kMoveTick = absl::Milliseconds(2);
constexpr absl::Duration kStatsInterval = absl::Seconds(1);
constexpr absl::Duration kLinkTimeout = absl::Seconds(10);
// A rank may ask for a checkpoint when its own island has committed a step and others still do.
constexpr absl::Duration kBoundaryPatience = absl::Seconds(10);

}  // namespace

absl::Status WorkerLoop::Run() {
  engine_->Advance();
  while (true) {
    memory_.beats().fetch_add(1, std::memory_order_relaxed);
    ZS_RETURN_IF_ERROR(Await());
    OnEvents();
    if (link_readable_) {
      absl::StatusOr<ControlLink::Command> command = link_.Receive(kLinkTimeout);
      if (!command.ok()) return command.status();
      ZS_ASSIGN_OR_RETURN(const bool go_on, OnCommand(std::move(*command)));
      if (!go_on) return absl::OkStatus();
    }
    engine_->Advance();
    if (RunShardCommands()) engine_->Advance();
    engine_->MoveStates();
    ZS_RETURN_IF_ERROR(send_status_);
    ZS_RETURN_IF_ERROR(engine_->health());
    const absl::Duration now = clock_.Elapsed();
    if (now >= next_tick_) {
      engine_->Tick();
      next_tick_ = now + kTick;
    }
    const uint64_t step = memory_.board().numbers().step;
    if (now >= next_stats_ || step != reported_step_) {
      SendStats();
      reported_step_ = step;
      next_stats_ = now + kStatsInterval;
    }
  }
}

absl::Status WorkerLoop::Await() {
  pollfd fds[2] = {{memory_.doorbell(memory_.worker()), POLLIN, 0}, {link_.fd(), POLLIN, 0}};
  const absl::Duration longest = engine_->IsMoving() ? kMoveTick : kTick;
  const int ready = poll(fds, 2, static_cast<int>(absl::ToInt64Milliseconds(longest)));
  if (ready < 0 && errno != EINTR) return ErrnoError(errno, "poll", "doorbell and link");
  link_readable_ = ready > 0 && fds[1].revents != 0;
  if (ready > 0 && fds[0].revents != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fds[0].fd, &count, sizeof(count));
  }
  return absl::OkStatus();
}

void WorkerLoop::OnEvents() {
  for (WorkerEvent& event : events_.Drain()) {
    if (auto* session = std::get_if<SessionEvent>(&event)) {
      if (session->rank >= memory_.ranks() || !memory_.is_home_of(session->rank)) continue;
      if (session->request.has_hello()) {
        engine_->OnHello(session->rank, session->request.hello());
      } else {
        engine_->OnRequest(session->rank, session->request);
      }
    } else if (auto* mesh = std::get_if<MeshFrame>(&event)) {
      engine_->OnMeshFrame(mesh->peer, std::move(mesh->frame));
    } else if (auto* lost = std::get_if<MeshLost>(&event)) {
      engine_->OnMeshLost(lost->reason);
    } else {
      engine_->OnMeshConnected();
    }
  }
}

void WorkerLoop::OnConnected(uint64_t epoch) {
  LogInfo(absl::StrCat("mesh connected epoch=", epoch));
  events_.Push(MeshConnected{});
}

void WorkerLoop::OnFrame(uint32_t peer, Frame frame) {
  events_.Push(MeshFrame{peer, std::move(frame)});
}

void WorkerLoop::OnDisconnected(const absl::Status& reason) { events_.Push(MeshLost{reason}); }

absl::StatusOr<bool> WorkerLoop::OnCommand(ControlLink::Command command) {
  using internal::v1::ToWorker;
  const ToWorker& message = command.message;
  switch (message.kind_case()) {
    case ToWorker::kRankAttached:
      sessions_->SetCredentials(message.rank_attached().rank(),
                                {message.rank_attached().generation(),
                                 message.rank_attached().token(), message.rank_attached().uid()});
      return true;
    case ToWorker::kRankDied:
      if (message.rank_died().rank() < memory_.ranks()) {
        sessions_->EndStream(message.rank_died().rank());
        engine_->OnRankDied(message.rank_died().rank());
      }
      return true;
    case ToWorker::kDropAttempt:
      engine_->OnDropAttempt(message.drop_attempt().generation());
      return true;
    case ToWorker::kPoison:
      engine_->OnPoison(absl::Status(static_cast<absl::StatusCode>(message.poison().code()),
                                     message.poison().message()),
                        message.poison().generation());
      return true;
    case ToWorker::kMove:
      engine_->OnMove(message.move());
      return true;
    case ToWorker::kSave:
    case ToWorker::kRestore:
    case ToWorker::kExportFile:
      shard_commands_.push_back({std::move(command), clock_.Elapsed() + kBoundaryPatience});
      return true;
    case ToWorker::kStoreReply:
      if (store_ != nullptr) store_->OnReply(message.store_reply());
      return true;
    case ToWorker::kGoBack:
      ZS_RETURN_IF_ERROR(GoBack(message.go_back()));
      return true;
    case ToWorker::kStop:
      SendStats();
      return false;
    default:
      return absl::DataLossError(absl::StrCat("unexpected command ", message.kind_case()));
  }
}

absl::Status WorkerLoop::GoBack(const internal::v1::GoBack& command) {
  if (absl::Status status = engine_->GoBack(command); !status.ok()) {
    SendStats();  // the last ones: what was found damaged is counted
    return status;
  }
  internal::v1::FromWorker reply;
  reply.mutable_went_back()->set_request(command.request());
  ToServer(reply);
  return absl::OkStatus();
}

bool WorkerLoop::RunShardCommands() {
  bool progress = false;
  while (!shard_commands_.empty()) {
    const ShardCommand& oldest = shard_commands_.front();
    if (!engine_->AtBoundary() && clock_.Elapsed() < oldest.until) break;
    internal::v1::FromWorker reply;
    *reply.mutable_shard_done() =
        RunShardCommand(*engine_, oldest.command.message, oldest.command.fds);
    shard_commands_.pop_front();
    ToServer(reply);
    progress = true;
  }
  return progress;
}

void WorkerLoop::ToRank(uint32_t rank, const trainer::v1::Failure& failure) {
  trainer::v1::SessionReply reply;
  *reply.mutable_failure() = failure;
  sessions_->Send(rank, std::move(reply));
}

void WorkerLoop::ToRank(uint32_t rank, const trainer::v1::HelloReply& hello) {
  trainer::v1::SessionReply reply;
  *reply.mutable_hello() = hello;
  sessions_->Send(rank, std::move(reply));
}

void WorkerLoop::ToServer(const internal::v1::FromWorker& message) {
  KeepFirstError(send_status_, link_.Send(message));
}

void WorkerLoop::SendStats() {
  internal::v1::FromWorker message;
  *message.mutable_stats() = engine_->Stats();
  ToServer(message);
}

}  // namespace zeroshard
