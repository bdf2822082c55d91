// What every Mesh must do, as functions that each implementation's test runs.
#ifndef ZEROSHARD_TESTS_CONFORMANCE_MESH_CONFORMANCE_H_
#define ZEROSHARD_TESTS_CONFORMANCE_MESH_CONFORMANCE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "transport/mesh.h"

namespace zeroshard {

// Keeps what a mesh reports, and lets a test wait for it.
class MeshRecorder final : public MeshObserver {
 public:
  void OnConnected(uint64_t epoch) override;
  void OnFrame(uint32_t peer, Frame frame) override;
  void OnDisconnected(const absl::Status& reason) override;

  // Waits for `count` connections / for `count` frames of `peer`; false after a generous time.
  bool AwaitConnections(size_t count);
  bool AwaitFrames(uint32_t peer, size_t count);
  std::vector<Frame> frames(uint32_t peer);
  // Waits for a reason with this code, and returns its text.
  std::string AwaitReason(absl::StatusCode code);

 private:
  absl::Mutex mu_;
  std::vector<uint64_t> epochs_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, std::vector<Frame>> frames_ ABSL_GUARDED_BY(mu_);
  std::vector<absl::Status> reasons_ ABSL_GUARDED_BY(mu_);
};

// A store in this process.
class MapStore final : public RendezvousStore {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;

 private:
  absl::Mutex mu_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

// One end, with the fingerprint "same".
using MeshFactory = std::function<absl::StatusOr<std::unique_ptr<Mesh>>(
    uint32_t worker, uint32_t workers, RendezvousStore& store, MeshObserver& observer)>;
// The same with another fingerprint.
using FingerprintedFactory = std::function<absl::StatusOr<std::unique_ptr<Mesh>>(
    uint32_t worker, uint32_t workers, RendezvousStore& store, MeshObserver& observer,
    const std::string& fingerprint)>;

// Frames of all sizes arrive whole and in order, between every pair.
void TestMeshDeliversInOrder(const MeshFactory& factory);
// When one end goes and comes again, all meet again, and frames flow.
void TestMeshComesBackAfterAnEndDied(const MeshFactory& factory);
// Frames to a mesh that does not stand are dropped, not delivered later.
void TestMeshDropsWhileNotConnected(const MeshFactory& factory);
// Who is waited for is named.
void TestMeshNamesWhoIsMissing(const MeshFactory& factory);
// Ends that disagree never meet, and all are told of it.
void TestMeshRefusesAnotherFingerprint(const FingerprintedFactory& factory);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_CONFORMANCE_MESH_CONFORMANCE_H_
