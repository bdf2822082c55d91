// FakeDaemon: the daemon as one attaching rank sees it: a real Trainer service, a real descriptor
// socket with real sealed memfds, and a FakeSessionService for a worker.
//
// Serves one job of any manifest and one rank. A test may change the AttachReply before it is sent,
// to see the client refuse what does not fit.
#ifndef ZEROSHARD_TESTS_FAKES_FAKE_DAEMON_H_
#define ZEROSHARD_TESTS_FAKES_FAKE_DAEMON_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/shared_memory.h"
#include "proto/trainer.pb.h"
#include "tests/fakes/fake_session_service.h"

namespace zeroshard {

class FakeDaemon {
 public:
  // Sockets are made below `folder`, which must exist and have a short path.
  explicit FakeDaemon(const std::string& folder);
  ~FakeDaemon();

  const std::string& socket() const;
  FakeSessionService& worker();

  // Changes every AttachReply from now on.
  void EditReply(std::function<void(trainer::v1::AttachReply&)> edit);
  // Answers every unary call with this.
  void FailCalls(absl::Status status);
  // What the descriptor socket says instead of "ok" and the descriptors.
  void RefuseDescriptors(std::string reason);
  // Never answers a call until the client cancels it.
  void HangCalls();

  // What came in.
  std::vector<trainer::v1::AttachRequest> attaches() const;
  std::vector<trainer::v1::DetachRequest> detaches() const;

  // The daemon's own mappings, once a rank has attached.
  MappedRegion& parameter_window();
  MappedRegion& gradient_window();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_FAKES_FAKE_DAEMON_H_
