#include "tests/fakes/nccl/transfer.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>

#include "tests/fakes/nccl/settings.h"

namespace zeroshard::fake_nccl {
namespace {

constexpr int kWaitMs = 1;

bool Matches(const Head& sent, const Head& expected) {
  if (!(sent == expected)) return false;
  if (sent.registered != expected.registered) {
    Misuse("registered memory on one side of a transfer, other memory on the other");
  }
  return true;
}

std::byte* At(const Transfer& transfer, uint64_t offset) {
  return reinterpret_cast<std::byte*>(transfer.address) + offset;
}

// One direction to or from one peer: heads and payloads, one after the other.
class Lane {
 public:
  void Add(const Transfer& transfer) { queue_.push_back(&transfer); }
  bool wanted() const { return !queue_.empty(); }
  bool usable() const { return wanted() && !dead_ && !stuck_; }
  bool dead() const { return dead_; }

  // As much as the socket takes now; whether it was anything.
  bool Send(int fd) {
    bool moved = false;
    while (usable()) {
      const Transfer& next = *queue_.front();
      const bool in_head = at_ < sizeof(Head);
      const void* from =
          in_head ? static_cast<const void*>(reinterpret_cast<const std::byte*>(&next.head) + at_)
                  : At(next, at_ - sizeof(Head));
      if (!Advance(::send(fd, from, Left(next), MSG_DONTWAIT | MSG_NOSIGNAL), next)) break;
      moved = true;
    }
    return moved;
  }

  bool Receive(int fd) {
    bool moved = false;
    while (usable()) {
      const Transfer& next = *queue_.front();
      const bool in_head = at_ < sizeof(Head);
      void* to = in_head ? static_cast<void*>(reinterpret_cast<std::byte*>(&head_) + at_)
                         : At(next, at_ - sizeof(Head));
      const ssize_t got = ::recv(fd, to, Left(next), MSG_DONTWAIT);
      if (got == 0) dead_ = true;
      if (got == 0 || !Advance(got, next)) break;
      moved = true;
      if (in_head && at_ >= sizeof(Head) && !Matches(head_, next.head)) stuck_ = true;
    }
    return moved;
  }

 private:
  size_t Left(const Transfer& next) const {
    const uint64_t end = at_ < sizeof(Head) ? sizeof(Head) : sizeof(Head) + next.head.bytes;
    return end - at_;
  }

  bool Advance(ssize_t moved, const Transfer& next) {
    if (moved < 0) {
      if (errno != EAGAIN && errno != EINTR) dead_ = true;
      return false;
    }
    at_ += static_cast<uint64_t>(moved);
    if (at_ == sizeof(Head) + next.head.bytes) {
      queue_.pop_front();
      at_ = 0;
    }
    return true;
  }

  std::deque<const Transfer*> queue_;
  uint64_t at_ = 0;
  Head head_;
  bool dead_ = false;
  bool stuck_ = false;
};

// What this rank sends to itself: matched in order. Whether all was.
bool MoveOwn(const Work& work, int rank) {
  std::vector<const Transfer*> sends;
  std::vector<const Transfer*> receives;
  for (const Transfer& send : work.sends) {
    if (send.peer == rank) sends.push_back(&send);
  }
  for (const Transfer& receive : work.receives) {
    if (receive.peer == rank) receives.push_back(&receive);
  }
  if (sends.size() != receives.size()) return false;
  for (size_t i = 0; i < sends.size(); ++i) {
    if (!Matches(sends[i]->head, receives[i]->head)) return false;
    if (sends[i]->address == receives[i]->address) continue;
    std::memmove(At(*receives[i], 0), At(*sends[i], 0), sends[i]->head.bytes);
  }
  return true;
}

void WaitForSockets(const Mesh& mesh, const std::vector<Lane>& sends,
                    const std::vector<Lane>& receives) {
  std::vector<pollfd> waits;
  for (size_t peer = 0; peer < sends.size(); ++peer) {
    short events = 0;
    if (sends[peer].usable()) events |= POLLOUT;
    if (receives[peer].usable()) events |= POLLIN;
    if (events != 0) waits.push_back({mesh.socket(static_cast<int>(peer)), events, 0});
  }
  ::poll(waits.data(), waits.size(), kWaitMs);
}

}  // namespace

bool Move(const Work& work, const Mesh& mesh, int rank, const TransferWatch& watch) {
  const size_t ranks = mesh.facts().size();
  std::vector<Lane> sends(ranks);
  std::vector<Lane> receives(ranks);
  std::vector<bool> reported(ranks);
  for (const Transfer& send : work.sends) {
    if (send.peer != rank) sends[static_cast<size_t>(send.peer)].Add(send);
  }
  for (const Transfer& receive : work.receives) {
    if (receive.peer != rank) receives[static_cast<size_t>(receive.peer)].Add(receive);
  }
  const bool own_matches = MoveOwn(work, rank);
  while (!watch.stop()) {
    bool moved = false;
    bool wanted = !own_matches;
    for (size_t peer = 0; peer < ranks; ++peer) {
      const int fd = mesh.socket(static_cast<int>(peer));
      moved = sends[peer].Send(fd) || moved;
      moved = receives[peer].Receive(fd) || moved;
      wanted = wanted || sends[peer].wanted() || receives[peer].wanted();
      if (!reported[peer] && (sends[peer].dead() || receives[peer].dead())) {
        reported[peer] = true;
        watch.dead(static_cast<int>(peer));
      }
    }
    if (!wanted) return true;
    if (!moved) WaitForSockets(mesh, sends, receives);
  }
  return false;
}

}  // namespace zeroshard::fake_nccl
