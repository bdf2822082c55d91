// Mesh: a Unix socket between every two ranks of a communicator, of one process or of several.
//
// Rank r listens at an abstract address made of the communicator's name and r, connects to the
// ranks below and accepts those above; who comes early waits. Nothing is left behind when a process
// dies.
#ifndef ZEROSHARD_TESTS_FAKES_NCCL_MESH_H_
#define ZEROSHARD_TESTS_FAKES_NCCL_MESH_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace zeroshard::fake_nccl {

// What ranks tell each other.
struct PeerFacts {
  int32_t rank = 0;
  int32_t ranks = 0;
  int32_t color = 0;  // of a split
  int32_t key = 0;
  std::array<uint8_t, 16> device = {};  // its UUID
};

class Mesh {
 public:
  Mesh() = default;
  Mesh(Mesh&& other) noexcept = default;
  Mesh& operator=(Mesh&& other) noexcept;
  ~Mesh();

  // Waits until all ranks are there or `stop` is set. Empty text when connected, else what failed.
  std::string Connect(const std::string& name, const PeerFacts& own, const std::atomic<bool>& stop);

  // The ranks of `chosen` (of this mesh, this rank among them) in that order; the others' sockets
  // are closed.
  Mesh Choose(const std::vector<int>& chosen) &&;

  // -1 for this rank.
  int socket(int rank) const { return sockets_[static_cast<size_t>(rank)]; }
  const std::vector<PeerFacts>& facts() const { return facts_; }

 private:
  std::string Greet(int fd, const PeerFacts& own, const std::atomic<bool>& stop);
  std::string ConnectTo(int peer, const std::string& name, const PeerFacts& own,
                        const std::atomic<bool>& stop);
  std::string AcceptAbove(int listener, const PeerFacts& own, const std::atomic<bool>& stop);

  std::vector<int> sockets_;
  std::vector<PeerFacts> facts_;
};

}  // namespace zeroshard::fake_nccl

#endif  // ZEROSHARD_TESTS_FAKES_NCCL_MESH_H_
