// Gloo between threads of one process, over loopback.
#include "transport/gloo_mesh.h"

#include <gtest/gtest.h>

#include "tests/conformance/mesh_conformance.h"

namespace zeroshard {
namespace {

absl::StatusOr<std::unique_ptr<Mesh>> MakeFingerprinted(uint32_t worker, uint32_t workers,
                                                        RendezvousStore& store,
                                                        MeshObserver& observer,
                                                        const std::string& fingerprint) {
  return CreateGlooMesh({.rendezvous = {.worker = worker,
                                        .workers = workers,
                                        .fingerprint = fingerprint,
                                        .timeout = absl::Seconds(20)}},
                        store, observer);
}

absl::StatusOr<std::unique_ptr<Mesh>> MakeGloo(uint32_t worker, uint32_t workers,
                                               RendezvousStore& store, MeshObserver& observer) {
  return MakeFingerprinted(worker, workers, store, observer, "same");
}

TEST(GlooMeshTest, DeliversInOrder) { TestMeshDeliversInOrder(MakeGloo); }
TEST(GlooMeshTest, ComesBackAfterAnEndDied) { TestMeshComesBackAfterAnEndDied(MakeGloo); }
TEST(GlooMeshTest, DropsWhileNotConnected) { TestMeshDropsWhileNotConnected(MakeGloo); }

TEST(GlooMeshTest, NamesWhoIsMissing) { TestMeshNamesWhoIsMissing(MakeGloo); }
TEST(GlooMeshTest, RefusesAnotherFingerprint) {
  TestMeshRefusesAnotherFingerprint(MakeFingerprinted);
}

TEST(GlooMeshTest, AnAddressThatIsNotThisHostsIsRefused) {
  MapStore store;
  MeshRecorder recorder;
  for (const char* address : {"no.such.host.invalid", "203.0.113.7", ""}) {
    const auto mesh =
        CreateGlooMesh({.rendezvous = {.workers = 2}, .address = address}, store, recorder);
    ASSERT_FALSE(mesh.ok());
    EXPECT_TRUE(absl::IsInvalidArgument(mesh.status())) << mesh.status();
    EXPECT_NE(std::string(mesh.status().message()).find(address), std::string::npos);
  }
}

}  // namespace
}  // namespace zeroshard
