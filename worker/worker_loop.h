// WorkerLoop: the one thread that does a worker's work.
//
// Waits for the doorbell (other workers, the front door) and the link to the server, hands what
// came to the engine, and lets it advance. Everything the engine says goes out through this object.
#ifndef ZEROSHARD_WORKER_WORKER_LOOP_H_
#define ZEROSHARD_WORKER_WORKER_LOOP_H_

#include <deque>
#include <memory>

#include "absl/status/status.h"
#include "base/clock.h"
#include "transport/mesh.h"
#include "worker/control_link.h"
#include "worker/control_store.h"
#include "worker/engine.h"
#include "worker/event_queue.h"
#include "worker/session_server.h"

namespace zeroshard {

class WorkerLoop final : public EngineOutput, public MeshObserver {
 public:
  // All must outlive this. SetEngine and SetSessions before Run.
  WorkerLoop(JobMemory& memory, ControlLink& link, EventQueue& events, const Clock& clock)
      : memory_(memory), link_(link), events_(events), clock_(clock) {}
  void SetEngine(Engine* engine) {
    engine_ = engine;
    engine->SetPump([this] { OnEvents(); });
  }
  void SetSessions(SessionServer* sessions) { sessions_ = sessions; }
  // Where answers of the rendezvous go; null where all workers share memory.
  void SetStore(ControlStore* store) { store_ = store; }

  // Runs until the server says stop (OK) or is gone (Unavailable).
  absl::Status Run();

  void ToRank(uint32_t rank, const trainer::v1::Failure& failure) override;
  void ToRank(uint32_t rank, const trainer::v1::HelloReply& reply) override;
  void ToServer(const internal::v1::FromWorker& message) override;

  // Transport threads.
  void OnConnected(uint64_t epoch) override;
  void OnFrame(uint32_t peer, Frame frame) override;
  void OnDisconnected(const absl::Status& reason) override;

 private:
  // Waits until the doorbell, the link or the next tick.
  absl::Status Await();
  void OnEvents();
  // Returns whether to go on.
  absl::StatusOr<bool> OnCommand(ControlLink::Command command);
  absl::Status GoBack(const internal::v1::GoBack& command);
  // Answers the commands about files when no step is being applied, or with an error when that
  // takes too long. Returns whether it answered any.
  bool RunShardCommands();
  void SendStats();

  JobMemory& memory_;
  ControlLink& link_;
  EventQueue& events_;
  const Clock& clock_;
  Engine* engine_ = nullptr;
  SessionServer* sessions_ = nullptr;
  ControlStore* store_ = nullptr;
  // A command about files and until when it may wait for a boundary between steps.
  struct ShardCommand {
    ControlLink::Command command;
    absl::Duration until;
  };
  std::deque<ShardCommand> shard_commands_;
  absl::Status send_status_;
  bool link_readable_ = false;
  absl::Duration next_tick_;
  absl::Duration next_stats_;
  uint64_t reported_step_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_WORKER_LOOP_H_
