// The framing between a server and its workers (proto/worker_link.h).
#include "proto/worker_link.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "base/fd_passing.h"
#include "proto/internal.pb.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(5);

struct Pair {
  Pair() {
    auto sockets = UnixSocketPair();
    a = std::move(sockets->first);
    b = std::move(sockets->second);
  }
  UniqueFd a, b;
};

ino_t Inode(int fd) {
  struct stat info {};
  fstat(fd, &info);
  return info.st_ino;
}

TEST(WorkerLink, BodiesOfEverySizeArrive) {
  Pair pair;
  for (const size_t bytes :
       {size_t{1}, size_t{32 * 1024}, size_t{32 * 1024 + 1}, size_t{5 << 20}}) {
    const std::string body(bytes, static_cast<char>('a' + bytes % 7));
    ASSERT_TRUE(SendLinkMessage(pair.a.get(), body, {}, kTimeout).ok());
    const auto received = ReceiveLinkMessage(pair.b.get(), kTimeout);
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_EQ(received->body, body);
    EXPECT_TRUE(received->fds.empty());
  }
}

TEST(WorkerLink, MoreDescriptorsThanOnePacketTakesArriveInOrder) {
  Pair pair;
  std::vector<UniqueFd> files;
  std::vector<int> fds;
  for (int i = 0; i < 200; ++i) {
    files.push_back(*ToMemfd(internal::v1::Start(), "file"));
    fds.push_back(files.back().get());
  }
  for (const size_t body : {size_t{10}, size_t{100000}}) {
    ASSERT_TRUE(SendLinkMessage(pair.a.get(), std::string(body, 'x'), fds, kTimeout).ok());
    const auto received = ReceiveLinkMessage(pair.b.get(), kTimeout);
    ASSERT_TRUE(received.ok()) << received.status();
    ASSERT_EQ(received->fds.size(), fds.size());
    for (size_t i = 0; i < fds.size(); ++i) {
      EXPECT_EQ(Inode(received->fds[i].get()), Inode(fds[i])) << i;
    }
  }
}

TEST(WorkerLink, AnEmptyMessageIsAMessage) {
  Pair pair;
  ASSERT_TRUE(SendLinkMessage(pair.a.get(), "", {}, kTimeout).ok());
  const auto received = ReceiveLinkMessage(pair.b.get(), kTimeout);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_TRUE(received->body.empty());
}

TEST(WorkerLink, APeerThatHasGoneIsUnavailable) {
  Pair pair;
  pair.a.reset();
  EXPECT_EQ(ReceiveLinkMessage(pair.b.get(), kTimeout).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(WorkerLink, WhatIsNoPacketIsDataLoss) {
  Pair pair;
  for (const std::string& bytes : {std::string("short"), std::string(64, '\xff')}) {
    ASSERT_TRUE(SendMessage(pair.a.get(), bytes, {}, kTimeout).ok());
    EXPECT_EQ(ReceiveLinkMessage(pair.b.get(), kTimeout).status().code(),
              absl::StatusCode::kDataLoss);
  }
}

TEST(WorkerLink, AMessageKeepsItsBytesInAMemfd) {
  internal::v1::WorkerStart start;
  start.set_job("gpt");
  start.set_lanes(4);
  const auto fd = ToMemfd(start, "start");
  ASSERT_TRUE(fd.ok()) << fd.status();
  internal::v1::WorkerStart back;
  ASSERT_TRUE(FromMemfd(fd->get(), &back).ok());
  EXPECT_EQ(back.SerializeAsString(), start.SerializeAsString());
}

}  // namespace
}  // namespace zeroshard
