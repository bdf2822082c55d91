// What one operation moves: messages between pairs of ranks, in order for each pair.
//
// Every collective is broken down into messages whose head says what it is. As in NCCL nothing
// makes up for ranks that do different things: a head that was not expected is waited over for
// ever.
#ifndef ZEROSHARD_TESTS_FAKES_NCCL_TRANSFER_H_
#define ZEROSHARD_TESTS_FAKES_NCCL_TRANSFER_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/fakes/nccl/mesh.h"

namespace zeroshard::fake_nccl {

enum class Kind : uint32_t { kAllGather = 1, kBroadcast, kMessage };

struct Head {
  Kind kind = Kind::kMessage;
  int32_t root = 0;
  uint64_t bytes = 0;
  // Not compared: both sides of a transfer must be registered or none, else the process ends.
  uint64_t registered = 0;

  friend bool operator==(const Head& a, const Head& b) {
    return a.kind == b.kind && a.root == b.root && a.bytes == b.bytes;
  }
};

struct Transfer {
  int peer = 0;
  Head head;
  uint64_t address = 0;
};

struct Work {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
};

struct TransferWatch {
  std::function<bool()> stop;
  std::function<void(int peer)> dead;  // called once for a peer that is gone and was needed
};

// Moves everything, on the stream's thread, where the memory can be touched. False when stopped.
bool Move(const Work& work, const Mesh& mesh, int rank, const TransferWatch& watch);

}  // namespace zeroshard::fake_nccl

#endif  // ZEROSHARD_TESTS_FAKES_NCCL_TRANSFER_H_
