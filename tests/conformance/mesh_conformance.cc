#include "tests/conformance/mesh_conformance.h"

#include <gtest/gtest.h>

#include <utility>

namespace zeroshard {
namespace {

constexpr absl::Duration kGenerous = absl::Seconds(30);

Frame MakeFrame(uint32_t kind, uint64_t tag, size_t bytes) {
  Frame frame{kind, kind + 1, tag, tag * 3, {}};
  frame.payload.resize(bytes);
  for (size_t i = 0; i < bytes; ++i) frame.payload[i] = static_cast<std::byte>(i * 7 + tag);
  return frame;
}

void ExpectSame(const Frame& got, const Frame& want) {
  EXPECT_EQ(got.kind, want.kind);
  EXPECT_EQ(got.index, want.index);
  EXPECT_EQ(got.tag, want.tag);
  EXPECT_EQ(got.value, want.value);
  EXPECT_TRUE(got.payload == want.payload);
}

std::unique_ptr<Mesh> Make(const MeshFactory& factory, uint32_t worker, uint32_t workers,
                           MapStore& store, MeshRecorder& recorder) {
  absl::StatusOr<std::unique_ptr<Mesh>> mesh = factory(worker, workers, store, recorder);
  EXPECT_TRUE(mesh.ok()) << mesh.status();
  return mesh.ok() ? std::move(*mesh) : nullptr;
}

}  // namespace

void MeshRecorder::OnConnected(uint64_t epoch) {
  absl::MutexLock lock(&mu_);
  if (!epochs_.empty()) {
    EXPECT_GT(epoch, epochs_.back());
  }
  epochs_.push_back(epoch);
}

void MeshRecorder::OnFrame(uint32_t peer, Frame frame) {
  absl::MutexLock lock(&mu_);
  EXPECT_FALSE(epochs_.empty()) << "a frame before the mesh stands";
  frames_[peer].push_back(std::move(frame));
}

void MeshRecorder::OnDisconnected(const absl::Status& reason) {
  EXPECT_FALSE(reason.ok());
  absl::MutexLock lock(&mu_);
  reasons_.push_back(reason);
}

std::string MeshRecorder::AwaitReason(absl::StatusCode code) {
  absl::MutexLock lock(&mu_);
  std::string text;
  auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (const absl::Status& reason : reasons_) {
      if (reason.code() == code) text = std::string(reason.message());
    }
    return !text.empty();
  };
  EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&there), kGenerous));
  return text;
}

bool MeshRecorder::AwaitConnections(size_t count) {
  absl::MutexLock lock(&mu_);
  auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return epochs_.size() >= count; };
  return mu_.AwaitWithTimeout(absl::Condition(&there), kGenerous);
}

bool MeshRecorder::AwaitFrames(uint32_t peer, size_t count) {
  absl::MutexLock lock(&mu_);
  auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return frames_[peer].size() >= count; };
  return mu_.AwaitWithTimeout(absl::Condition(&there), kGenerous);
}

std::vector<Frame> MeshRecorder::frames(uint32_t peer) {
  absl::MutexLock lock(&mu_);
  return frames_[peer];
}

absl::Status MapStore::Set(const std::string& key, const std::string& value) {
  absl::MutexLock lock(&mu_);
  values_[key] = value;
  return absl::OkStatus();
}

absl::StatusOr<std::string> MapStore::Get(const std::string& key, absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return values_.contains(key); };
  if (!mu_.AwaitWithTimeout(absl::Condition(&there), timeout))
    return absl::DeadlineExceededError(key);
  return values_[key];
}

void TestMeshDeliversInOrder(const MeshFactory& factory) {
  constexpr uint32_t kWorkers = 3;
  const std::vector<size_t> sizes = {0, 1, 4096, 1 << 20, 3, 0, 65537};
  MapStore store;
  std::vector<MeshRecorder> recorders(kWorkers);
  std::vector<std::unique_ptr<Mesh>> meshes;
  for (uint32_t w = 0; w < kWorkers; ++w)
    meshes.push_back(Make(factory, w, kWorkers, store, recorders[w]));
  for (MeshRecorder& recorder : recorders) ASSERT_TRUE(recorder.AwaitConnections(1));
  for (uint32_t from = 0; from < kWorkers; ++from) {
    for (uint32_t to = 0; to < kWorkers; ++to) {
      if (from == to) continue;
      for (size_t i = 0; i < sizes.size(); ++i)
        meshes[from]->Send(to, MakeFrame(from, i, sizes[i]));
    }
  }
  for (uint32_t to = 0; to < kWorkers; ++to) {
    for (uint32_t from = 0; from < kWorkers; ++from) {
      if (from == to) continue;
      ASSERT_TRUE(recorders[to].AwaitFrames(from, sizes.size()));
      const std::vector<Frame> frames = recorders[to].frames(from);
      for (size_t i = 0; i < sizes.size(); ++i) ExpectSame(frames[i], MakeFrame(from, i, sizes[i]));
    }
  }
}

void TestMeshComesBackAfterAnEndDied(const MeshFactory& factory) {
  constexpr uint32_t kWorkers = 3;
  MapStore store;
  std::vector<MeshRecorder> recorders(kWorkers);
  MeshRecorder successor;  // outlives the mesh that reports to it
  std::vector<std::unique_ptr<Mesh>> meshes;
  for (uint32_t w = 0; w < kWorkers; ++w)
    meshes.push_back(Make(factory, w, kWorkers, store, recorders[w]));
  for (MeshRecorder& recorder : recorders) ASSERT_TRUE(recorder.AwaitConnections(1));
  meshes[1].reset();
  meshes[1] = Make(factory, 1, kWorkers, store, successor);
  ASSERT_TRUE(successor.AwaitConnections(1));
  ASSERT_TRUE(recorders[0].AwaitConnections(2));
  ASSERT_TRUE(recorders[2].AwaitConnections(2));
  meshes[0]->Send(1, MakeFrame(9, 1, 1000));
  meshes[1]->Send(2, MakeFrame(9, 2, 1000));
  ASSERT_TRUE(successor.AwaitFrames(0, 1));
  ASSERT_TRUE(recorders[2].AwaitFrames(1, 1));
  ExpectSame(successor.frames(0).back(), MakeFrame(9, 1, 1000));
}

void TestMeshDropsWhileNotConnected(const MeshFactory& factory) {
  MapStore store;
  std::vector<MeshRecorder> recorders(2);
  std::unique_ptr<Mesh> first = Make(factory, 0, 2, store, recorders[0]);
  first->Send(1, MakeFrame(1, 1, 10));
  std::unique_ptr<Mesh> second = Make(factory, 1, 2, store, recorders[1]);
  ASSERT_TRUE(recorders[0].AwaitConnections(1));
  first->Send(1, MakeFrame(2, 2, 10));
  ASSERT_TRUE(recorders[1].AwaitFrames(0, 1));
  ExpectSame(recorders[1].frames(0).front(), MakeFrame(2, 2, 10));
}

void TestMeshNamesWhoIsMissing(const MeshFactory& factory) {
  MapStore store;
  std::vector<MeshRecorder> recorders(3);
  std::unique_ptr<Mesh> first = Make(factory, 0, 3, store, recorders[0]);
  std::unique_ptr<Mesh> last = Make(factory, 2, 3, store, recorders[2]);
  for (MeshRecorder* recorder : {&recorders[0], &recorders[2]}) {
    EXPECT_NE(recorder->AwaitReason(absl::StatusCode::kUnavailable).find("worker 1"),
              std::string::npos);
  }
}

void TestMeshRefusesAnotherFingerprint(const FingerprintedFactory& factory) {
  MapStore store;
  std::vector<MeshRecorder> recorders(3);
  std::vector<std::unique_ptr<Mesh>> meshes;
  for (uint32_t w = 0; w < 3; ++w) {
    absl::StatusOr<std::unique_ptr<Mesh>> mesh =
        factory(w, 3, store, recorders[w], w == 2 ? "layout 2" : "layout 1");
    ASSERT_TRUE(mesh.ok()) << mesh.status();
    meshes.push_back(*std::move(mesh));
  }
  for (MeshRecorder& recorder : recorders) {
    const std::string text = recorder.AwaitReason(absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(text.find("worker 2"), std::string::npos) << text;
    EXPECT_NE(text.find("{layout 1}"), std::string::npos) << text;
    EXPECT_NE(text.find("{layout 2}"), std::string::npos) << text;
  }
}

}  // namespace zeroshard
