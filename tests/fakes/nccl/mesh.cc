#include "tests/fakes/nccl/mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

namespace zeroshard::fake_nccl {
namespace {

constexpr int kWaitMs = 2;
constexpr char kStopped[] = "stopped";

// An abstract address: no file, gone with the socket.
socklen_t Address(const std::string& name, int rank, sockaddr_un& address) {
  const std::string text = "zeroshard-fake-nccl-" + name + "." + std::to_string(rank);
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, text.data(), text.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

bool WaitFor(int fd, short events, const std::atomic<bool>& stop) {
  while (!stop.load()) {
    pollfd wait = {fd, events, 0};
    if (::poll(&wait, 1, kWaitMs) > 0) return true;
  }
  return false;
}

// False at the end of the stream, on an error and when stopped.
bool ReadAll(int fd, void* to, size_t bytes, const std::atomic<bool>& stop) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    if (!WaitFor(fd, POLLIN, stop)) return false;
    const ssize_t got = ::recv(fd, at, bytes, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (got < 0) continue;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

Mesh& Mesh::operator=(Mesh&& other) noexcept {
  std::swap(sockets_, other.sockets_);
  std::swap(facts_, other.facts_);
  return *this;
}

Mesh::~Mesh() {
  for (const int fd : sockets_) {
    if (fd >= 0) ::close(fd);
  }
}

// Both ends say who they are; the socket then stands for the peer.
std::string Mesh::Greet(int fd, const PeerFacts& own, const std::atomic<bool>& stop) {
  PeerFacts peer;
  if (::send(fd, &own, sizeof(own), MSG_NOSIGNAL) != sizeof(own) ||
      !ReadAll(fd, &peer, sizeof(peer), stop)) {
    ::close(fd);
    return stop.load() ? kStopped : "";
  }
  const bool known = peer.rank >= 0 && peer.rank < own.ranks && peer.rank != own.rank;
  if (peer.ranks != own.ranks || !known || socket(peer.rank) >= 0) {
    ::close(fd);
    return "rank " + std::to_string(peer.rank) + " has a communicator of " +
           std::to_string(peer.ranks) + " ranks, this one of " + std::to_string(own.ranks);
  }
  sockets_[static_cast<size_t>(peer.rank)] = fd;
  facts_[static_cast<size_t>(peer.rank)] = peer;
  return "";
}

std::string Mesh::ConnectTo(int peer, const std::string& name, const PeerFacts& own,
                            const std::atomic<bool>& stop) {
  sockaddr_un address;
  const socklen_t length = Address(name, peer, address);
  while (socket(peer) < 0) {
    if (stop.load()) return kStopped;
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return std::string("socket: ") + std::strerror(errno);
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) {
      if (std::string problem = Greet(fd, own, stop); !problem.empty()) return problem;
      continue;
    }
    ::close(fd);
    ::usleep(1000 * kWaitMs);
  }
  return "";
}

std::string Mesh::AcceptAbove(int listener, const PeerFacts& own, const std::atomic<bool>& stop) {
  for (int waited = own.rank + 1; waited < own.ranks;) {
    if (socket(waited) >= 0) {
      ++waited;
      continue;
    }
    if (!WaitFor(listener, POLLIN, stop)) return kStopped;
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    if (std::string problem = Greet(fd, own, stop); !problem.empty()) return problem;
  }
  return "";
}

std::string Mesh::Connect(const std::string& name, const PeerFacts& own,
                          const std::atomic<bool>& stop) {
  sockets_.assign(static_cast<size_t>(own.ranks), -1);
  facts_.resize(static_cast<size_t>(own.ranks));
  facts_[static_cast<size_t>(own.rank)] = own;
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0) return std::string("socket: ") + std::strerror(errno);
  sockaddr_un address;
  const socklen_t length = Address(name, own.rank, address);
  std::string problem;
  if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener, own.ranks) != 0) {
    problem = "rank " + std::to_string(own.rank) + " is there twice: " + std::strerror(errno);
  }
  for (int peer = 0; problem.empty() && peer < own.rank; ++peer) {
    problem = ConnectTo(peer, name, own, stop);
  }
  if (problem.empty()) problem = AcceptAbove(listener, own, stop);
  ::close(listener);
  return problem;
}

Mesh Mesh::Choose(const std::vector<int>& chosen) && {
  Mesh part;
  for (const int rank : chosen) {
    part.sockets_.push_back(std::exchange(sockets_[static_cast<size_t>(rank)], -1));
    part.facts_.push_back(facts_[static_cast<size_t>(rank)]);
  }
  return part;
}

}  // namespace zeroshard::fake_nccl
