// GlooMesh: a Mesh over Gloo's TCP transport. The only user of Gloo; its exceptions end here.
//
// How workers meet, and meet again when a mesh failed: transport/mesh_rendezvous.h.
#ifndef ZEROSHARD_TRANSPORT_GLOO_MESH_H_
#define ZEROSHARD_TRANSPORT_GLOO_MESH_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/mesh.h"
#include "transport/mesh_rendezvous.h"

namespace zeroshard {

struct GlooMeshOptions {
  RendezvousOptions rendezvous;
  // Address to bind to; loopback between workers of one host.
  std::string address = "127.0.0.1";
};

// Starts setting the mesh up at once. `store` and `observer` must outlive the mesh. InvalidArgument
// for an address that is none of this host's.
absl::StatusOr<std::unique_ptr<Mesh>> CreateGlooMesh(const GlooMeshOptions& options,
                                                     RendezvousStore& store,
                                                     MeshObserver& observer);

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_GLOO_MESH_H_
