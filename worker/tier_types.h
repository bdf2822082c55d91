// What an NvmeTier is told, what it is asked for, and what it counts (worker/nvme_tier.h).
#ifndef ZEROSHARD_WORKER_TIER_TYPES_H_
#define ZEROSHARD_WORKER_TIER_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "device/cpu/cache.h"
#include "device/cpu/thread_pool.h"
#include "proto/model.pb.h"
#include "storage/io_backend.h"
#include "storage/io_queue.h"
#include "storage/nvme_manifest.h"
#include "storage/nvme_plan.h"

namespace zeroshard {

// Where a job goes on whose region is lost (docs/nvme.md, "Power loss").
struct TierResume {
  ManifestState state;     // that all workers have
  uint64_t committed = 0;  // attempt under which it is the job's committed state from now on
};

// Whom a tier asks before each transfer, so that what moves on a path may be bounded and shared
// with others. Loop thread only.
class IoGate {
 public:
  virtual ~IoGate() = default;
  // Zero when the transfer may start now; it counts as started. Else when to ask again.
  virtual absl::Duration TryStart(uint32_t path, IoOperation operation, uint64_t bytes) = 0;
  // A transfer that was started is complete, well or not.
  virtual void Done(uint32_t path) = 0;
  // A transfer that may have had to wait is not wanted any more.
  virtual void Withdraw(uint32_t path, IoOperation operation) = 0;
};

// What is left on disk of a worker whose region is lost.
struct TierRemains {
  bool missing = false;               // there is no manifest file
  bool unused = false;                // its job had not begun its first step
  std::vector<ManifestState> states;  // that a job may go on from
  std::string problem;                // why there are not more
};

struct NvmeTierPath {
  std::string path;
  uint64_t weight = 1;
  bool allow_network_path = false;
};

struct NvmeTierOptions {
  std::string job;  // for messages
  uint64_t job_id = 0;
  uint64_t layout_fingerprint = 0;
  uint32_t worker = 0;
  model::v1::NvmeConfig config;
  std::vector<NvmeTierPath> paths;
  IoBackend backend = IoBackend::kThreads;
  absl::Duration io_timeout = absl::Seconds(30);  // of one transfer
  absl::Duration settle_time = absl::Seconds(5);  // for a queue to end after one timed out
  // Images of so many bytes together are computed before another lane would be awake; 0: every
  // image wakes one.
  uint64_t one_lane_bytes = uint64_t{320} << 10;
  // Images in staging memory at once are kept within so many bytes where drive and lanes need no
  // more: what the caches hold costs the drive and the lanes no memory traffic. 0: not limited.
  uint64_t cache_bytes = LastLevelCacheBytes() / 2;
  std::span<std::byte> table;  // the slot-table region
  bool recover = false;        // it holds a predecessor's table
  uint64_t committed = 0;      // the job's last committed attempt
  // Instead of both: the files are there, of a job whose region is lost.
  std::optional<TierResume> resume = std::nullopt;
  // Room in a manifest for what is committed with a step (NvmeTier::Seal).
  uint64_t manifest_extra = uint64_t{1} << 20;
  ThreadPool* pool = nullptr;  // without one all work is done by the loop thread
  // Called with staging memory when it is made, so that it may be pinned.
  std::function<absl::Status(std::span<std::byte>)> pin = [](std::span<std::byte>) {
    return absl::OkStatus();
  };
  IoGate* gate = nullptr;              // without one nothing waits; outlives the tier
  std::function<void()> beat = [] {};  // called at least every 100 ms while the tier waits
  // What queues are made by; tests put a faulty one around it.
  std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(IoBackend, const IoQueueOptions&)>
      make_queue = MakeIoQueue;
};

// One item of a pass.
struct TierItem {
  uint32_t read = kNoImage;   // its committed contents are read and verified first
  bool rewrite = false;       // and what `work` made of them, in place, is written
  uint32_t write = kNoImage;  // an image that `work` fills and that is written
  uint64_t tag = 0;           // the caller's
};

// The images' bytes; arrays lie at plan().shape(image).offset(i). Null where the item has none.
struct TierBuffers {
  std::byte* read = nullptr;
  std::byte* write = nullptr;
};

using TierWork = absl::FunctionRef<absl::Status(const TierItem&, const TierBuffers&)>;

// What the work of a pass needs from elsewhere, and what it makes that goes elsewhere, beside the
// images: gradients and parameters of a GPU. Copies of other items run while an item is computed.
// Called on the loop thread, for every item that is worked on, in the order of the functions; an
// error ends the pass.
class TierFeed {
 public:
  virtual ~TierFeed() = default;
  // What the item's work needs begins to come. False: there is no room now, to be asked again.
  virtual absl::StatusOr<bool> Begin(const TierItem& item) = 0;
  // Whether it has come. The work is not done before.
  virtual absl::StatusOr<bool> HasCome(const TierItem& item) = 0;
  // The work is done: what it made begins to go.
  virtual absl::Status Leave(const TierItem& item) = 0;
  // Waits until it is there. No image of the item is complete before.
  virtual absl::Status Arrive(const TierItem& item) = 0;
};

struct TierPathCounters {
  uint64_t read_bytes = 0;  // of whole images
  uint64_t written_bytes = 0;
  absl::Duration busy;  // at least one transfer was in flight
  uint64_t errors = 0;
};

struct TierCounters {
  std::vector<TierPathCounters> paths;
  absl::Duration passes;   // spent in Run
  absl::Duration waiting;  // of it: no lane had anything to do because transfers were awaited
  absl::Duration compute;  // of all lanes
  absl::Duration seals;    // flushes and manifests of durability power
  uint64_t retries = 0;    // images that failed to be moved and were tried again
  uint64_t damaged_images = 0;
  uint64_t rebuilt_images = 0;  // of them: made anew by StateTier
  uint64_t failed_slots = 0;    // taken out of use after an error
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_TIER_TYPES_H_
