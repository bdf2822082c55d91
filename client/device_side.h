// DeviceSide: what a session of a job on GPUs does beside its requests. Only for client/session*.
//
// Holds the data plane, and what the session must know to drive it: which units have values, which
// request was a gather of what, and whether a step is waiting to be settled. Any thread.
//
// A thread looks after the data plane: a trainer may be waiting for its own stream, which waits for
// a collective that will never end. When the generation is dead, or a collective stands still, the
// thread aborts the communicators: the stream goes on, with values that nobody may use, and the
// next call of the session says why.
#ifndef ZEROSHARD_CLIENT_DEVICE_SIDE_H_
#define ZEROSHARD_CLIENT_DEVICE_SIDE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/attach.h"
#include "client/daemon_client.h"
#include "client/dataplane/data_plane.h"
#include "client/parameter_feed.h"
#include "client/request_channel.h"
#include "client/session.h"

namespace zeroshard {

class DeviceSide {
 public:
  // Makes the data plane of an attached rank; all ranks at about the same time. `attachment` gives
  // its descriptors away; daemon and channel must outlive this.
  static absl::StatusOr<std::unique_ptr<DeviceSide>> Create(Attachment& attachment,
                                                            const AttachOptions& options,
                                                            const DaemonClient& daemon,
                                                            RequestChannel& channel);
  ~DeviceSide();

  DataPlane& plane() { return *plane_; }
  const DataPlane& plane() const { return *plane_; }

  // Of a request that was sent. Waits for it where a unit is gathered for the first time: then its
  // values may not be there yet.
  absl::Status Gathered(RequestId id, std::span<const uint32_t> units);
  // A gather of this rank alone: units that do not stay come through the window of the host, one by
  // one. `submit` sends a request; returns the last one's id.
  using Submit = std::function<absl::StatusOr<RequestId>(trainer::v1::SessionRequest)>;
  absl::StatusOr<RequestId> GatherAlone(std::span<const uint32_t> units, const Submit& submit);
  // Where parameters rest on the NVMe tier (feeds) all other gathers: units that do not stay have a
  // request each, and are arranged later: before what needs them is asked of the data plane.
  bool feeds() const { return feed_ != nullptr; }
  absl::StatusOr<RequestId> GatherFed(std::span<const uint32_t> units, bool prefetch,
                                      const Submit& submit);
  absl::Status Arrange(std::span<const uint32_t> units);
  absl::Status ArrangeAll();
  // As DataPlane's.
  absl::Status Release(std::span<const uint32_t> units, StreamHandle stream);
  // The units of a gather; empty for any other request.
  std::vector<uint32_t> UnitsOf(RequestId id) const;

  // Before Step is sent, and after.
  absl::Status BeforeStep();
  void StepSent(RequestId id);
  // Waits for the step that was sent, if any, and brings the data plane to the next one: before
  // anything that belongs to that.
  absl::Status Settle(const std::function<absl::Status(RequestId)>& wait,
                      const std::function<StepResult()>& result);
  bool IsUnsettledStep(RequestId id) const;
  // After a restore.
  absl::Status Restored();

  // What a dead data plane becomes: the reason of the generation, which the worker is told of, or
  // at last its own.
  absl::Status Poll();

 private:
  void Watch();
  void Note(RequestId id, std::span<const uint32_t> units);

  DeviceSide(const Layout& layout, std::shared_ptr<const MappedRegion> window,
             RequestChannel& channel)
      : layout_(layout),
        window_(std::move(window)),
        channel_(channel),
        readable_(layout.units().size(), 0),
        gathered_(layout.units().size(), 0) {}

  const Layout& layout_;
  const std::shared_ptr<const MappedRegion> window_;  // parameters on the host, of all ranks
  RequestChannel& channel_;
  std::unique_ptr<DataPlane> plane_;
  std::unique_ptr<ParameterFeed> feed_;  // null: parameters do not rest on the NVMe tier
  std::thread watcher_;                  // ends before plane_

  mutable absl::Mutex mu_;
  std::vector<char> readable_ ABSL_GUARDED_BY(mu_);  // by unit: it has had values
  std::vector<char> gathered_ ABSL_GUARDED_BY(mu_);  // by unit, with the others
  std::map<RequestId, std::vector<uint32_t>> gathers_ ABSL_GUARDED_BY(mu_);
  std::optional<RequestId> step_ ABSL_GUARDED_BY(mu_);
  uint64_t attempt_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Mutex settling_ ABSL_ACQUIRED_BEFORE(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DEVICE_SIDE_H_
