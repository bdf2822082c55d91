// Stream: the requests of one rank on their way to its worker, over one gRPC stream on a Unix
// socket that is opened again when it breaks.
//
//   Send -> [one write in flight, the rest queued] -> worker
//   OnFailure <- replies <- worker
//
// A worker that died is replaced behind the same socket path. The stream then connects with
// back-off, says Hello{reconnect}, asks its owner for all requests without a completion and sends
// those first. It is given up after `patience` without a connection, or when the worker refuses the
// rank: the first such error sticks.
//
// Threads: Send from any thread. The owner's methods are called on threads of the stream without
// any of its locks, and never after the destructor has returned.
#ifndef ZEROSHARD_CLIENT_STREAM_H_
#define ZEROSHARD_CLIENT_STREAM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/pending_requests.h"

namespace zeroshard {

namespace trainer::v1 {
class HelloReply;
}  // namespace trainer::v1

class StreamOwner {
 public:
  virtual ~StreamOwner() = default;
  // Calls `send_again` once with the unfinished requests in the order of their ids, and lets no
  // Send happen meanwhile.
  virtual void WithUnfinished(
      const std::function<void(const std::vector<SharedRequest>&)>& send_again) = 0;
  // Request `id` failed; id 0: the whole job did.
  virtual void OnFailure(uint64_t id, absl::Status reason) = 0;
  // The stream is given up.
  virtual void OnBroken(absl::Status reason) = 0;
  // OK, or why no worker will answer the first Hello any more: asked while there is no answer.
  virtual absl::Status Verdict() const = 0;
};

class Stream {
 public:
  struct Options {
    std::string socket{};  // of the worker
    std::string token{};   // never logged
    uint32_t rank = 0;
    uint64_t generation = 0;
    absl::Duration hello_timeout = absl::Seconds(30);  // for one try
    absl::Duration patience = absl::Seconds(60);       // without a connection
  };

  // Connects and says Hello; `owner` must outlive the stream.
  static absl::StatusOr<std::unique_ptr<Stream>> Open(Options options, StreamOwner* owner);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The worker's answer to the first Hello.
  const trainer::v1::HelloReply& hello() const;

  // Queues the request and returns. While there is no connection it does nothing: WithUnfinished
  // will bring the request back.
  void Send(SharedRequest request);

  // Ends the connection and the stream's threads; Send then does nothing. May be called again.
  void Close();

  // How the connection is, in words, for an error: "the worker is connected".
  std::string Describe() const;
  // Times the stream was opened again.
  uint64_t reconnects() const;

 private:
  class Impl;
  explicit Stream(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_STREAM_H_
