// GlooMesh: a Mesh over Gloo's TCP transport. The only user of Gloo; its exceptions end here.
//
// Epochs: the mesh of epoch e is set up through keys "mesh/e/..."; "mesh/e/joined_<worker>" says
// who took part, and holds the worker's fingerprint: unequal ones never make a mesh. A worker whose
// mesh of epoch e failed goes on to e + 1; a worker that starts looks for the first epoch that its
// predecessors did not use. As all channels of a failed mesh are closed, every worker moves on and
// meets the others in one epoch.
#ifndef ZEROSHARD_TRANSPORT_GLOO_MESH_H_
#define ZEROSHARD_TRANSPORT_GLOO_MESH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/mesh.h"

namespace zeroshard {

struct GlooMeshOptions {
  uint32_t worker = 0;
  uint32_t workers = 1;
  // Address to bind to; loopback between workers of one host.
  std::string address = "127.0.0.1";
  // How long one set-up may take, other workers' starts included.
  absl::Duration connect_timeout = absl::Seconds(60);
  // What all workers must have in common, as text that tells a reader what differs.
  std::string fingerprint = "none";
  // By worker, for messages: "worker 2 of node 1 (10.0.0.2:7401)"; empty: by number.
  std::vector<std::string> names = {};
};

// Starts setting the mesh up at once. `store` and `observer` must outlive the mesh. InvalidArgument
// for an address that is none of this host's.
absl::StatusOr<std::unique_ptr<Mesh>> CreateGlooMesh(const GlooMeshOptions& options,
                                                     RendezvousStore& store,
                                                     MeshObserver& observer);

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_GLOO_MESH_H_
