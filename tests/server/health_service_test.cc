#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/clock.h"
#include "proto/health.grpc.pb.h"
#include "server/event_loop.h"
#include "server/services.h"

namespace zeroshard {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

class HealthServiceTest : public testing::Test {
 protected:
  void SetUp() override {
    auto loop = EventLoop::Create(&clock_);
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
    context_.loop = loop_.get();
    service_ = MakeHealthService(&context_);
    grpc::ServerBuilder builder;
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    stub_ = Health::NewStub(server_->InProcessChannel({}));
  }
  void TearDown() override { server_->Shutdown(); }

  static HealthCheckRequest For(const std::string& service) {
    HealthCheckRequest request;
    request.set_service(service);
    return request;
  }
  // What Check answers.
  grpc::Status Check(const std::string& service, HealthCheckResponse* reply) {
    grpc::ClientContext call;
    return stub_->Check(&call, For(service), reply);
  }

  SystemClock clock_;
  std::unique_ptr<EventLoop> loop_;
  ServiceContext context_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Health::Stub> stub_;
};

TEST_F(HealthServiceTest, TheDaemonAndItsServicesServe) {
  for (const char* service :
       {"", "zeroshard.trainer.v1.Trainer", "zeroshard.admin.v1.Admin", "grpc.health.v1.Health"}) {
    HealthCheckResponse reply;
    ASSERT_TRUE(Check(service, &reply).ok()) << service;
    EXPECT_EQ(reply.status(), HealthCheckResponse::SERVING) << service;
  }
}

TEST_F(HealthServiceTest, AnUnknownServiceIsNotFound) {
  HealthCheckResponse reply;
  const grpc::Status status = Check("zeroshard.trainer.v2.Trainer", &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_NE(status.error_message().find("zeroshard.trainer.v2.Trainer"), std::string::npos);
}

TEST_F(HealthServiceTest, WhoWatchesIsToldOfTheEnd) {
  grpc::ClientContext call;
  auto stream = stub_->Watch(&call, For(""));
  HealthCheckResponse told;
  ASSERT_TRUE(stream->Read(&told));
  EXPECT_EQ(told.status(), HealthCheckResponse::SERVING);
  loop_->Stop();
  ASSERT_TRUE(stream->Read(&told));
  EXPECT_EQ(told.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(stream->Read(&told));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(HealthServiceTest, WhoWatchesAnUnknownServiceIsToldSo) {
  grpc::ClientContext call;
  auto stream = stub_->Watch(&call, For("no.such.Service"));
  HealthCheckResponse told;
  ASSERT_TRUE(stream->Read(&told));
  EXPECT_EQ(told.status(), HealthCheckResponse::SERVICE_UNKNOWN);
  call.TryCancel();
  EXPECT_FALSE(stream->Read(&told));
}

}  // namespace
}  // namespace zeroshard
