// A Mesh between engines of one test: frames wait in queues until the test delivers them.
//
// Deliver(w) hands worker w what arrived, as the worker's loop would. Break() loses everything
// under way and reconnects, as when a worker died.
#ifndef ZEROSHARD_TESTS_FAKES_LOOPBACK_MESH_H_
#define ZEROSHARD_TESTS_FAKES_LOOPBACK_MESH_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "transport/mesh.h"

namespace zeroshard {

class LoopbackMesh {
 public:
  explicit LoopbackMesh(uint32_t workers) : queues_(workers) {
    for (uint32_t w = 0; w < workers; ++w) ends_.push_back(std::make_unique<End>(*this, w));
  }

  Mesh& end(uint32_t worker) { return *ends_[worker]; }
  // Frames for `worker`, with their senders.
  std::deque<std::pair<uint32_t, Frame>> Take(uint32_t worker) {
    return std::exchange(queues_[worker], {});
  }
  // Those of one sender; the others' wait.
  std::vector<Frame> TakeFrom(uint32_t worker, uint32_t peer) {
    std::vector<Frame> taken;
    std::erase_if(queues_[worker], [&](auto& entry) {
      if (entry.first != peer) return false;
      taken.push_back(std::move(entry.second));
      return true;
    });
    return taken;
  }
  void Break() {
    for (auto& queue : queues_) queue.clear();
  }

 private:
  class End final : public Mesh {
   public:
    End(LoopbackMesh& mesh, uint32_t worker) : mesh_(mesh), worker_(worker) {}
    void Send(uint32_t peer, Frame frame) override {
      mesh_.queues_[peer].emplace_back(worker_, std::move(frame));
    }

   private:
    LoopbackMesh& mesh_;
    const uint32_t worker_;
  };

  std::vector<std::deque<std::pair<uint32_t, Frame>>> queues_;
  std::vector<std::unique_ptr<End>> ends_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_FAKES_LOOPBACK_MESH_H_
