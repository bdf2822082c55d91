#include "base/fd_passing.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <thread>

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kShort = absl::Milliseconds(20);
constexpr absl::Duration kLong = absl::Seconds(20);

class UnixSocketTest : public ::testing::Test {
 protected:
  UnixSocketTest() {
    char pattern[] = "/tmp/zs-socket-XXXXXX";
    directory_ = ::mkdtemp(pattern);
    path_ = directory_ + "/s";
  }
  ~UnixSocketTest() override {
    ::unlink(path_.c_str());
    ::rmdir(directory_.c_str());
  }

  std::string directory_;
  std::string path_;
};

TEST_F(UnixSocketTest, CarriesBytesAndDescriptors) {
  const UniqueFd listener = ListenUnix(path_, 0600).value();
  const UniqueFd client = ConnectUnix(path_, kLong).value();
  const UniqueFd server = AcceptUnix(listener.get(), kLong).value();

  std::array<int, 2> pipe_fds = {};
  ASSERT_EQ(::pipe2(pipe_fds.data(), O_CLOEXEC), 0);
  ASSERT_TRUE(SendMessage(client.get(), "two ends", pipe_fds, kLong).ok());
  ::close(pipe_fds[0]);
  ::close(pipe_fds[1]);

  const absl::StatusOr<Message> message = ReceiveMessage(server.get(), kLong);
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->bytes, "two ends");
  ASSERT_EQ(message->fds.size(), 2u);
  EXPECT_EQ(::fcntl(message->fds[0].get(), F_GETFD), FD_CLOEXEC);
  char byte = 0;
  ASSERT_EQ(::write(message->fds[1].get(), "x", 1), 1);
  ASSERT_EQ(::read(message->fds[0].get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
}

TEST_F(UnixSocketTest, KnowsThePeer) {
  const UniqueFd listener = ListenUnix(path_, 0600).value();
  const UniqueFd client = ConnectUnix(path_, kLong).value();
  const UniqueFd server = AcceptUnix(listener.get(), kLong).value();
  const PeerCredentials peer = GetPeerCredentials(server.get()).value();
  EXPECT_EQ(peer.pid, ::getpid());
  EXPECT_EQ(peer.uid, ::getuid());
}

TEST_F(UnixSocketTest, FileModeIsSet) {
  const UniqueFd listener = ListenUnix(path_, 0660).value();
  struct stat info = {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660u);
}

TEST_F(UnixSocketTest, AStaleFileIsReplacedALiveOneIsNot) {
  { const UniqueFd crashed = ListenUnix(path_, 0600).value(); }
  absl::StatusOr<UniqueFd> listener = ListenUnix(path_, 0600);
  ASSERT_TRUE(listener.ok()) << listener.status();
  const absl::Status second = ListenUnix(path_, 0600).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.message()), HasSubstr("in use by a running process"));
  EXPECT_TRUE(ConnectUnix(path_, kLong).ok());
}

TEST_F(UnixSocketTest, AnOrdinaryFileIsNeverRemoved) {
  std::ofstream(path_) << "precious";
  EXPECT_EQ(ListenUnix(path_, 0600).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(::access(path_.c_str(), F_OK), 0);
}

TEST_F(UnixSocketTest, PathLimitIsChecked) {
  EXPECT_TRUE(CheckUnixPath(std::string(107, 'a')).ok());
  const absl::Status status = ListenUnix("/tmp/" + std::string(120, 'a'), 0600).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("125 bytes, the limit is 107"));
  EXPECT_FALSE(CheckUnixPath("").ok());
  EXPECT_FALSE(CheckUnixPath(std::string_view("a\0b", 3)).ok());
}

TEST_F(UnixSocketTest, ConnectSaysWhyItFailed) {
  EXPECT_EQ(ConnectUnix(path_, kShort).status().code(), absl::StatusCode::kNotFound);
  { const UniqueFd crashed = ListenUnix(path_, 0600).value(); }
  EXPECT_EQ(ConnectUnix(path_, kShort).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(UnixSocketTest, StreamSocketsForServersOfOtherProtocols) {
  const UniqueFd listener = ListenUnix(path_, 0600, UnixSocketType::kStream).value();
  EXPECT_TRUE(ConnectUnix(path_, kLong, UnixSocketType::kStream).ok());
  EXPECT_TRUE(AcceptUnix(listener.get(), kLong).ok());
}

TEST_F(UnixSocketTest, WaitsEndAtTheirDeadline) {
  const UniqueFd listener = ListenUnix(path_, 0600).value();
  EXPECT_EQ(AcceptUnix(listener.get(), kShort).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  const auto pair = UnixSocketPair().value();
  EXPECT_EQ(ReceiveMessage(pair.first.get(), kShort).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  // The peer does not read: the buffer fills up.
  absl::Status status;
  const std::string block(kMaxMessageBytes, 'x');
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    status = SendMessage(pair.first.get(), block, {}, kShort);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(MessageTest, AClosedPeerIsUnavailable) {
  auto [one, other] = UnixSocketPair().value();
  other.reset();
  EXPECT_EQ(SendMessage(one.get(), "x", {}, kLong).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReceiveMessage(one.get(), kLong).status().code(), absl::StatusCode::kUnavailable);
}

// Was lost: the kernel tells of the reset before it hands out what is in the queue.
TEST(MessageTest, TheLastWordsOfAPeerThatDidNotListenAreHeard) {
  auto [one, other] = UnixSocketPair().value();
  ASSERT_TRUE(SendMessage(one.get(), "unread", {}, kLong).ok());
  ASSERT_TRUE(SendMessage(other.get(), "last words", {}, kLong).ok());
  other.reset();
  EXPECT_EQ(ReceiveMessage(one.get(), kLong)->bytes, "last words");
  EXPECT_EQ(ReceiveMessage(one.get(), kLong).status().code(), absl::StatusCode::kUnavailable);
}

TEST(MessageTest, AWaitingReceiverWakesWhenThePeerDies) {
  auto [one, other] = UnixSocketPair().value();
  std::thread killer([peer = std::move(other)]() mutable { peer.reset(); });
  EXPECT_EQ(ReceiveMessage(one.get(), kLong).status().code(), absl::StatusCode::kUnavailable);
  killer.join();
}

TEST(MessageTest, LimitsAreChecked) {
  const auto [one, other] = UnixSocketPair().value();
  EXPECT_FALSE(SendMessage(one.get(), "", {}, kLong).ok());
  EXPECT_FALSE(SendMessage(one.get(), std::string(kMaxMessageBytes + 1, 'x'), {}, kLong).ok());
  const std::vector<int> many(kMaxFdsPerMessage + 1, 0);
  EXPECT_FALSE(SendMessage(one.get(), "x", many, kLong).ok());
  const std::vector<int> most(kMaxFdsPerMessage, 0);
  ASSERT_TRUE(SendMessage(one.get(), "x", most, kLong).ok());
  EXPECT_EQ(ReceiveMessage(other.get(), kLong)->fds.size(), kMaxFdsPerMessage);
}

TEST(MessageTest, ATooLongMessageIsDroppedWhole) {
  const auto [one, other] = UnixSocketPair().value();
  ASSERT_TRUE(SendMessage(one.get(), "0123456789", {}, kLong).ok());
  ASSERT_TRUE(SendMessage(one.get(), "next", {}, kLong).ok());
  EXPECT_EQ(ReceiveMessage(other.get(), kLong, 5).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReceiveMessage(other.get(), kLong, 5)->bytes, "next");
}

}  // namespace
}  // namespace zeroshard
