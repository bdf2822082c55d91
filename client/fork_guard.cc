#include "client/fork_guard.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace zeroshard {
namespace {

struct Watched {
  std::atomic<int> fd{-1};
  std::atomic<uint64_t> inode{0};  // of the socket: a number that was reused does not match
};

std::atomic<uint64_t> g_generation{1};
std::atomic<uint32_t> g_next{0};
std::array<Watched, 256> g_watched;

void InChild() {
  g_generation.fetch_add(1, std::memory_order_relaxed);
  for (Watched& watched : g_watched) {
    const int fd = watched.fd.exchange(-1, std::memory_order_relaxed);
    struct stat info {};
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) &&
        info.st_ino == watched.inode.load(std::memory_order_relaxed)) {
      close(fd);
    }
  }
}

void InstallOnce() {
  static const int installed = pthread_atfork(nullptr, nullptr, &InChild);
  static_cast<void>(installed);
}

}  // namespace

uint64_t ForkGeneration() {
  InstallOnce();
  return g_generation.load(std::memory_order_relaxed);
}

void CloseInForkedChildren(int fd) {
  InstallOnce();
  struct stat info {};
  if (fstat(fd, &info) != 0) return;
  Watched& watched = g_watched[g_next.fetch_add(1, std::memory_order_relaxed) % g_watched.size()];
  watched.fd.store(-1, std::memory_order_relaxed);
  watched.inode.store(info.st_ino, std::memory_order_relaxed);
  watched.fd.store(fd, std::memory_order_relaxed);
}

}  // namespace zeroshard
