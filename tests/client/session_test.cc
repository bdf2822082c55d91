// Sessions against a fake daemon: real sockets, real descriptors, real mappings.
#include "client/session.h"

#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/write_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/model.pb.h"
#include "tests/fakes/fake_daemon.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() {
    char folder[] = "/tmp/zs-session-XXXXXX";
    folder_ = mkdtemp(folder);
    daemon_ = std::make_unique<FakeDaemon>(folder_);
  }
  ~SessionTest() override {
    daemon_.reset();
    for (const char* name : {"/daemon", "/fds", "/worker"}) unlink((folder_ + name).c_str());
    rmdir(folder_.c_str());
  }

  AttachOptions Options() const {
    AttachOptions options{.socket = daemon_->socket(), .job = "gpt", .rank = 1, .world_size = 2};
    options.parameters.resize(2);
    options.parameters[0].name = "weight";
    options.parameters[0].shape = {30, 40};
    options.parameters[1].name = "bias";
    options.parameters[1].shape = {40};
    options.groups.push_back({.lr = 0.25});
    options.overrides["train_batch_size"] = "8";
    options.timeout = absl::Seconds(20);
    return options;
  }

  std::unique_ptr<Session> Attach() {
    auto session = Session::Attach(Options());
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }

  absl::Status AttachError() { return Session::Attach(Options()).status(); }

  std::string folder_;
  std::unique_ptr<FakeDaemon> daemon_;
};

TEST_F(SessionTest, AttachSendsTheManifestAndBringsTheState) {
  trainer::v1::HelloReply hello;
  hello.set_step(12);
  hello.set_updates(11);
  hello.set_loss_scale(1024);
  hello.set_user_state("state");
  hello.set_initialized(true);
  daemon_->worker().SetHello(hello);
  auto session = Attach();
  const auto request = daemon_->attaches().at(0);
  EXPECT_EQ(request.job(), "gpt");
  EXPECT_EQ(request.rank(), 1u);
  EXPECT_EQ(request.manifest().parameters_size(), 2);
  EXPECT_EQ(request.manifest().parameters(0).dtype(), model::v1::DTYPE_FLOAT32);
  EXPECT_EQ(request.manifest().groups(0).lr(), 0.25);
  EXPECT_EQ(request.overrides().at("train_batch_size"), "8");
  EXPECT_EQ(request.timeout_ms(), 20000u);
  EXPECT_EQ(session->state().step, 12u);
  EXPECT_EQ(session->state().updates, 11u);
  EXPECT_EQ(session->state().loss_scale, 1024.0);
  EXPECT_EQ(session->state().user_state, "state");
  EXPECT_TRUE(session->state().initialized);
  EXPECT_EQ(session->config().stage(), 3u);
  EXPECT_THAT(session->warnings(), ElementsAre("a key has no effect"));
  EXPECT_EQ(session->layout().parameters().size(), 2u);
}

TEST_F(SessionTest, WindowsAreTheDaemonsMemory) {
  auto session = Attach();
  std::memcpy(daemon_->parameter_window().data(), "value", 5);
  EXPECT_EQ(std::memcmp(session->parameter_window().data(), "value", 5), 0);
  std::memcpy(session->gradient_window().data() + 64, "gradient", 8);
  EXPECT_EQ(std::memcmp(daemon_->gradient_window().data() + 64, "gradient", 8), 0);
}

TEST_F(SessionTest, ADaemonThatLaysOutDifferentlyIsRefused) {
  daemon_->EditReply([](auto& reply) { reply.set_layout_fingerprint(7); });
  const absl::Status status = AttachError();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("same version"));
}

TEST_F(SessionTest, RegionsThatAreNotAsPromisedAreRefused) {
  daemon_->EditReply([](auto& reply) { reply.mutable_regions(0)->set_bytes(1 << 20); });
  EXPECT_FALSE(AttachError().ok()) << "longer than its file";
  daemon_->EditReply([](auto& reply) { reply.mutable_regions(0)->set_bytes(4096 / 2); });
  EXPECT_FALSE(AttachError().ok()) << "shorter than the layout";
  daemon_->EditReply([](auto& reply) {
    reply.mutable_regions(2)->set_kind(trainer::v1::Region::KIND_GRADIENT_WINDOW);
  });
  EXPECT_FALSE(AttachError().ok()) << "twice the same kind";
  daemon_->EditReply([](auto& reply) { reply.mutable_regions()->RemoveLast(); });
  EXPECT_TRUE(absl::IsDataLoss(AttachError())) << "more descriptors than regions";
}

TEST_F(SessionTest, ErrorsOfTheDaemonArriveAsTheyAre) {
  daemon_->FailCalls(absl::InvalidArgumentError("rank 1 says world size 2, rank 0 said 4"));
  EXPECT_EQ(AttachError(), absl::InvalidArgumentError("rank 1 says world size 2, rank 0 said 4"));
  daemon_->FailCalls(absl::OkStatus());
  daemon_->RefuseDescriptors("this token has ended");
  EXPECT_TRUE(absl::IsPermissionDenied(AttachError()));
  AttachOptions options = Options();
  options.socket = folder_ + "/nobody";
  const absl::Status status = Session::Attach(std::move(options)).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("start zeroshardd"));
}

TEST_F(SessionTest, AnAttachThatWaitsForOthersCanBeInterrupted) {
  daemon_->HangCalls();
  AttachOptions options = Options();
  options.interrupted = [] { return true; };
  EXPECT_TRUE(absl::IsCancelled(Session::Attach(std::move(options)).status()));
}

TEST_F(SessionTest, ASlotIsFreeWhenItsScatterCompletes) {
  auto session = Attach();
  const uint64_t bytes = session->layout().units()[0].bytes();
  const uint64_t fits = session->gradient_window().size() / bytes;
  std::vector<RequestId> scatters;
  for (uint64_t i = 0; i < fits; ++i) {
    const auto slot = session->AcquireSlot(bytes);
    ASSERT_TRUE(slot.ok()) << slot.status();
    scatters.push_back(*session->Scatter({.unit = 0, .window_offset = *slot}));
  }
  const absl::Status full = session->AcquireSlot(bytes, absl::Milliseconds(20)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(full)) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("gradient window"));
  std::thread completer([&] {
    ASSERT_TRUE(daemon_->worker().AwaitRequests(1 + fits));
    daemon_->worker().Complete(scatters[0]);
  });
  EXPECT_EQ(*session->AcquireSlot(bytes), 0u);
  completer.join();
  EXPECT_TRUE(session->AbandonSlot(0).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(session->AbandonSlot(0)));
  EXPECT_TRUE(absl::IsInvalidArgument(session->AcquireSlot(1 << 30).status()));
}

TEST_F(SessionTest, TheCallersMistakesAreNotSent) {
  auto session = Attach();
  const uint32_t no_unit[] = {9};
  EXPECT_TRUE(absl::IsInvalidArgument(session->Gather(no_unit).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(session->Release({}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(session->Scatter({.window_offset = 64}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      session->Scatter({.window_offset = 0, .present = "too long"}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      session->Put({.unit = 0, .element_offset = 3, .elements = 256}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(session->Put({.unit = 0, .elements = 1 << 20}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(session->Step({.user_state = std::string(2000, 'x')}).status()));
  EXPECT_THAT(daemon_->worker().ids(), ElementsAre());
}

TEST_F(SessionTest, AStepCarriesTheGroupsAndBringsItsResult) {
  auto session = Attach();
  daemon_->worker().AutoComplete([&](const trainer::v1::SessionRequest& request) {
    if (!request.has_step()) return;
    daemon_->worker().PublishStep({.step = 1, .attempt = 9, .updates = 1, .loss_scale = 2.0});
  });
  ASSERT_TRUE(session->Wait(*session->Step({.user_state = "mine"})).ok());
  EXPECT_EQ(session->step_result().step, 1u);
  EXPECT_EQ(session->step_result().attempt, 9u);
  ASSERT_TRUE(session->Wait(*session->Step({.groups = {{.lr = 0.5}}})).ok());
  ASSERT_TRUE(session->Wait(*session->Step({})).ok());
  const auto requests = daemon_->worker().requests();
  EXPECT_EQ(requests.at(1).step().groups(0).lr(), 0.25);
  EXPECT_EQ(requests.at(1).step().user_state(), "mine");
  EXPECT_EQ(requests.at(2).step().groups(0).lr(), 0.5);
  EXPECT_EQ(requests.at(3).step().groups(0).lr(), 0.5) << "they stay until they are changed";
}

TEST_F(SessionTest, SaveAndDetachReachTheDaemon) {
  auto session = Attach();
  const auto saved = session->Save("best");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->directory, "/checkpoints/best");
  EXPECT_EQ(saved->step, 4u);
  ASSERT_TRUE(session->Detach(Session::JobState::kKeep).ok());
  EXPECT_TRUE(daemon_->detaches().at(0).keep());
  EXPECT_TRUE(absl::IsFailedPrecondition(session->MicroEnd(0).status()));
}

TEST_F(SessionTest, CloseKeepsTheWindowsMapped) {
  auto session = Attach();
  const auto window = session->gradient_window();
  session->Close();
  EXPECT_TRUE(absl::IsFailedPrecondition(session->MicroEnd(0).status()));
  std::memset(window.data(), 1, window.size());
}

TEST_F(SessionTest, AForkedChildHasNoSession) {
  auto session = Attach();
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = absl::IsFailedPrecondition(session->MicroEnd(0).status()) &&
                         absl::IsFailedPrecondition(session->Wait(1)) &&
                         absl::IsFailedPrecondition(session->Detach()) &&
                         session->parameter_window().empty() && !session->Done(1);
    session.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  daemon_->worker().AutoComplete();
  EXPECT_TRUE(session->Wait(*session->MicroEnd(0)).ok()) << "the parent goes on";
}

sigjmp_buf g_after_fault;

TEST_F(SessionTest, AWriteToAParameterNamesItAndGoesOnToTheHandlerBefore) {
  auto session = Attach();
  struct sigaction before {};
  before.sa_handler = [](int) { siglongjmp(g_after_fault, 1); };
  sigemptyset(&before.sa_mask);
  ASSERT_EQ(sigaction(SIGSEGV, &before, nullptr), 0);
  ASSERT_TRUE(InstallWriteGuard().ok());
  WriteGuardEntry entry(*session);
  const ParameterPlace& bias = session->layout().place(1);
  const std::byte* address = session->parameter_window().data() +
                             session->layout().units()[bias.unit].window_offset +
                             bias.offset * sizeof(float);
  testing::internal::CaptureStderr();
  if (sigsetjmp(g_after_fault, 1) == 0) {
    *const_cast<volatile std::byte*>(address) = std::byte{1};
    FAIL() << "the write went through";
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("parameter 'bias' is read-only"));
  signal(SIGSEGV, SIG_DFL);
}

}  // namespace
}  // namespace zeroshard
