// ControlStore: the rendezvous store of this worker's mesh, kept by the server and reached over the
// link.
//
// Set and Get from any thread but the loop's, which delivers the answers (OnReply). Requests that
// the server does not answer in time fail.
#ifndef ZEROSHARD_WORKER_CONTROL_STORE_H_
#define ZEROSHARD_WORKER_CONTROL_STORE_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/internal.pb.h"
#include "transport/mesh.h"
#include "worker/control_link.h"

namespace zeroshard {

class ControlStore final : public RendezvousStore {
 public:
  explicit ControlStore(ControlLink& link) : link_(link) {}

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;

  // Loop thread.
  void OnReply(const internal::v1::StoreReply& reply);
  // Fails all that wait, now and later.
  void Close();

 private:
  absl::StatusOr<std::string> Call(internal::v1::StoreRequest request, absl::Duration timeout);

  ControlLink& link_;
  absl::Mutex mu_;
  uint64_t next_request_ ABSL_GUARDED_BY(mu_) = 1;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::map<uint64_t, absl::StatusOr<std::string>> replies_ ABSL_GUARDED_BY(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_CONTROL_STORE_H_
