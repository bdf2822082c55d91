// FakeSessionService: a worker's front door that a test holds in its hand.
//
// A real gRPC server on a Unix socket, and a real completion page in a sealed memfd. Requests are
// recorded and complete only when the test says so (or at once, with AutoComplete); the test can
// cut the stream, refuse to answer, fail a request, poison the job, or replace the worker.
//
// Any thread; the object must outlive its clients' calls.
#ifndef ZEROSHARD_TESTS_FAKES_FAKE_SESSION_SERVICE_H_
#define ZEROSHARD_TESTS_FAKES_FAKE_SESSION_SERVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/shared_memory.h"
#include "proto/trainer.pb.h"
#include "storage/rank_page.h"

namespace zeroshard {

class FakeSessionService {
 public:
  // Makes the page; no server yet. `socket` must be a short path that does not exist.
  explicit FakeSessionService(std::string socket);
  ~FakeSessionService();

  // Starts or stops serving at the socket. Stop cuts all streams, as the death of a worker does.
  void Start();
  void Stop();

  const std::string& socket() const { return socket_; }
  int page_fd() const { return page_fd_.get(); }
  RankPage& page() { return *page_.As<RankPage>(); }

  // --- What came in ---
  // Requests of all streams so far, Hellos included, in order of arrival.
  std::vector<trainer::v1::SessionRequest> requests() const;
  // Waits up to 10 s until `count` requests have come; returns whether they have.
  bool AwaitRequests(size_t count) const;
  // The ids of the requests that are not Hellos.
  std::vector<uint64_t> ids() const;

  // --- What goes out ---
  // What the next Hellos are answered with.
  void SetHello(trainer::v1::HelloReply reply);
  // The next `count` Hellos end the stream with this instead.
  void RefuseHellos(int count, absl::Status status);
  // Completes every request as it comes. `before`, when set, runs first, on the server's thread.
  void AutoComplete(std::function<void(const trainer::v1::SessionRequest&)> before = {});
  // Publishes a completion, as a worker does.
  void Complete(uint64_t id, RankPage::Outcome outcome = RankPage::kOk);
  // Sends the reason of a failure on the stream, without touching the page.
  void SendFailure(uint64_t id, absl::Status reason);
  // Both, in the worker's order.
  void Fail(uint64_t id, absl::Status reason);
  // `reason`: what the page says; nothing when OK.
  void PoisonPage(const absl::Status& reason = absl::OkStatus());
  void PublishStep(const StepResult& result);
  // Ends the streams with this status; the server goes on.
  void EndStreams(absl::Status status);

 private:
  class Service;
  struct Server;

  void Wake();

  const std::string socket_;
  UniqueFd page_fd_;
  MappedRegion page_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<Server> server_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_FAKES_FAKE_SESSION_SERVICE_H_
