// A channel to a real gRPC server and a real page, both in the test's hand.
#ifndef ZEROSHARD_TESTS_CLIENT_REQUEST_CHANNEL_FIXTURE_H_
#define ZEROSHARD_TESTS_CLIENT_REQUEST_CHANNEL_FIXTURE_H_

#include <unistd.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/request_channel.h"
#include "gtest/gtest.h"
#include "tests/fakes/fake_session_service.h"

namespace zeroshard {

using trainer::v1::SessionRequest;

inline constexpr absl::Duration kLong = absl::Seconds(30);

inline SessionRequest Release(uint32_t unit) {
  SessionRequest request;
  request.mutable_release()->add_units(unit);
  return request;
}

inline SessionRequest StepOf(uint32_t micro_steps) {
  SessionRequest request;
  request.mutable_step()->set_micro_steps(micro_steps);
  return request;
}

class RequestChannelTest : public ::testing::Test {
 protected:
  RequestChannelTest() : fake_(absl::StrCat("/tmp/zs-channel-", getpid(), "-", counter_++)) {
    fake_.Start();
  }

  std::unique_ptr<RequestChannel> Open(absl::Duration timeout = kLong,
                                       absl::Duration patience = kLong) {
    auto channel = RequestChannel::Open(fake_.page(),
                                        {.socket = fake_.socket(),
                                         .token = "secret",
                                         .rank = 3,
                                         .generation = 5,
                                         .patience = patience},
                                        timeout);
    EXPECT_TRUE(channel.ok()) << channel.status();
    return channel.ok() ? *std::move(channel) : nullptr;
  }

  static inline int counter_ = 0;
  FakeSessionService fake_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_CLIENT_REQUEST_CHANNEL_FIXTURE_H_
