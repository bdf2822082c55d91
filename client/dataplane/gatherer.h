// Gatherer: parameters of all ranks' shards in this rank's window.
//
// A unit that is not resident is gathered by every Gather that names it: what a rank moves depends
// on the order of gathers alone, which the control plane compares. Its memory is mapped by the
// first one, and given back when others need room and no call uses the unit: at most
// max_live_elements are mapped, unless units in use are more. One caller at a time. Only for
// client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_GATHERER_H_
#define ZEROSHARD_CLIENT_DATAPLANE_GATHERER_H_

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dataplane/plane_core.h"
#include "client/dataplane/rank_links.h"
#include "client/dataplane/stream_log.h"
#include "client/dataplane/trainer_memory.h"
#include "device/cuda/memory.h"
#include "device/cuda/registered_parts.h"
#include "device/cuda/stream.h"
#include "transport/nccl/communicator.h"

namespace zeroshard {

class Gatherer {
 public:
  // `shared`: where DEVICE_SHARED is mapped. `links`: null where there is one rank. All must
  // outlive this.
  static absl::StatusOr<std::unique_ptr<Gatherer>> Create(PlaneCore& core, OwnMemory& memory,
                                                          const DeviceMemory& shared,
                                                          RankLinks* links);

  bool resident(uint32_t unit) const { return units_[unit].resident; }
  // As in DataPlane.
  absl::Status Gather(std::span<const uint32_t> units);
  absl::StatusOr<uint64_t> GatherFrom(uint32_t unit, uint64_t offset);
  absl::Status AwaitCopied(uint64_t mark);
  absl::Status Place(uint32_t unit, std::span<const std::byte> values);
  absl::Status WaitOn(uint32_t unit, CudaStream& stream);
  absl::Status WaitOnHost(uint32_t unit);
  absl::Status Release(std::span<const uint32_t> units, CudaStream& stream);
  // Gathers the resident units that were gathered before; `trained`: only those that steps change.
  enum class Which : uint8_t { kTrainable, kAll };
  absl::Status Refresh(Which which);

  // Returns when all ranks have called it.
  absl::Status Barrier();

  absl::Status CheckProgress() { return log_.CheckProgress(core_.options().timeout); }
  absl::StatusOr<bool> Idle() { return log_.Done(log_.last()); }
  uint64_t gathered_bytes() const { return gathered_bytes_; }
  uint64_t evictions() const { return evictions_; }
  uint64_t peak_window_bytes() const { return peak_window_bytes_; }

 private:
  struct Use {
    bool resident = false;
    uint32_t users = 0;                 // gathers that no release has undone
    uint64_t mark = 0;                  // of the last gather; 0: never gathered
    std::optional<CudaEvent> released;  // the last use, as released
    bool has_release = false;
    std::optional<std::list<uint32_t>::iterator> idle;  // its place in idle_
  };

  Gatherer(PlaneCore& core, OwnMemory& memory, DeviceAddress shared, RankLinks* links,
           StreamLog log);

  // Where the window is one allocation that stays: registers it, and the shards, with NCCL.
  absl::Status Register(const DeviceMemory& shared);
  absl::Status CheckUnits(std::span<const uint32_t> units) const;
  // Puts the all-gathers of these units, which are mapped, on the stream. `shard`: of the only
  // unit, where this rank's lies in host memory; null: where it rests.
  absl::Status Enqueue(std::span<const uint32_t> units, const std::byte* shard = nullptr);
  NcclGather PlanOf(uint32_t unit) const;
  // Of parameters on the host: this rank's slice of a mapped unit comes to the window.
  absl::Status FetchSlice(uint32_t unit, const std::byte* shard);
  absl::Status CopyFromHost(uint32_t unit, std::span<const std::byte> values);
  void RegisterHostParameters();
  absl::Status RegisterRing();
  absl::Status Map(uint32_t unit);
  absl::Status EvictOldest();
  void Busy(Use& use);

  PlaneCore& core_;
  OwnMemory& memory_;
  const DeviceAddress shared_;
  RankLinks* const links_;
  StreamLog log_;
  std::vector<Use> units_;
  std::optional<RegisteredParts> host_parameters_;  // copies of other memory are slower
  RegisteredHost ring_;
  uint64_t copied_ = 0;           // mark of the last copy from the ring
  DeviceMemory meeting_;          // of barriers; made by the first
  std::list<uint32_t> idle_;      // mapped, of no use now; least recently released first
  uint64_t mapped_elements_ = 0;  // of units that are not resident
  uint64_t gathered_bytes_ = 0;
  uint64_t evictions_ = 0;
  uint64_t peak_window_bytes_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_GATHERER_H_
