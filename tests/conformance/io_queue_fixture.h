// What tests of I/O queues share: a queue driven one transfer at a time, files, and contents.
#ifndef ZEROSHARD_TESTS_CONFORMANCE_IO_QUEUE_FIXTURE_H_
#define ZEROSHARD_TESTS_CONFORMANCE_IO_QUEUE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "storage/aligned_buffer.h"
#include "storage/io_backend.h"
#include "storage/io_queue.h"

namespace zeroshard {

inline Deadline Soon() { return Deadline::After(absl::Seconds(30)); }

inline std::unique_ptr<IoQueue> Made(absl::StatusOr<std::unique_ptr<IoQueue>> queue) {
  EXPECT_TRUE(queue.ok()) << queue.status();
  return queue.ok() ? std::move(*queue) : nullptr;
}

inline AlignedBuffer Buffer(size_t bytes) {
  absl::StatusOr<AlignedBuffer> buffer = AlignedBuffer::Make(bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return *std::move(buffer);
}

inline ScratchFile Scratch() {
  absl::StatusOr<ScratchFile> file = OpenScratchFile(::testing::TempDir());
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

// Bytes that differ between places and between seeds.
inline void Fill(std::span<std::byte> memory, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (std::byte& byte : memory) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
}

inline bool IsFilled(std::span<const std::byte> memory, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (const std::byte byte : memory) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    if (byte != static_cast<std::byte>(state >> 56)) return false;
  }
  return true;
}

inline IoTransfer Write(int fd, std::span<std::byte> memory, uint64_t offset, uint64_t tag = 0) {
  return {.operation = IoOperation::kWrite,
          .fd = fd,
          .memory = memory.data(),
          .bytes = memory.size(),
          .offset = offset,
          .tag = tag};
}

inline IoTransfer Read(int fd, std::span<std::byte> memory, uint64_t offset, uint64_t tag = 0) {
  IoTransfer transfer = Write(fd, memory, offset, tag);
  transfer.operation = IoOperation::kRead;
  return transfer;
}

inline IoTransfer Sync(int fd, uint64_t tag = 0) {
  return {.operation = IoOperation::kSync, .fd = fd, .tag = tag};
}

// Submits, and waits for the one completion there is.
inline absl::Status Do(IoQueue& queue, const IoTransfer& transfer) {
  if (absl::Status submitted = queue.Submit(transfer); !submitted.ok()) return submitted;
  const std::vector<IoCompletion> done = queue.Wait(1, Soon());
  EXPECT_EQ(done.size(), 1u);
  if (done.size() != 1) return absl::InternalError("no completion");
  EXPECT_EQ(done[0].tag, transfer.tag);
  return done[0].status;
}

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_CONFORMANCE_IO_QUEUE_FIXTURE_H_
