// EventQueue: what gRPC and transport threads hand to the loop thread.
//
// Push from any thread rings the doorbell (an eventfd, not owned); Drain from the loop thread only.
#ifndef ZEROSHARD_WORKER_EVENT_QUEUE_H_
#define ZEROSHARD_WORKER_EVENT_QUEUE_H_

#include <unistd.h>

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "proto/trainer.pb.h"
#include "transport/mesh.h"

namespace zeroshard {

struct SessionEvent {
  uint32_t rank = 0;
  trainer::v1::SessionRequest request;  // a Hello opens the rank's stream
};

struct MeshConnected {};
struct MeshLost {  // or who is waited for
  absl::Status reason;
};
struct MeshFrame {
  uint32_t peer = 0;
  Frame frame;
};

using WorkerEvent = std::variant<SessionEvent, MeshConnected, MeshLost, MeshFrame>;

class EventQueue {
 public:
  explicit EventQueue(int doorbell) : doorbell_(doorbell) {}

  void Push(WorkerEvent event) {
    {
      absl::MutexLock lock(&mu_);
      events_.push_back(std::move(event));
    }
    constexpr uint64_t kOne = 1;
    [[maybe_unused]] const ssize_t written = write(doorbell_, &kOne, sizeof(kOne));
  }

  std::vector<WorkerEvent> Drain() {
    absl::MutexLock lock(&mu_);
    return std::exchange(events_, {});
  }

 private:
  const int doorbell_;
  absl::Mutex mu_;
  std::vector<WorkerEvent> events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_EVENT_QUEUE_H_
