// RankPort: what a home worker does for one of its ranks.
//
// Takes the rank's requests in order, checks them (a trainer is not trusted), posts their effects
// on the board, and publishes completions in the rank's page. Scatters, micro ends and steps go
// through one queue, in order; one gradient of a unit is on the board at a time, a further one
// waits. Gathers, releases and puts do not queue behind them.
//
// Everything posted is idempotent by request id, so a rank may send again what was not completed
// when its worker died. A new process of the rank (a Hello without reconnect) starts anew at id 1:
// gradients of the dead process that not every worker has used are taken back first, because the
// new process will write to the same window; its own replay brings the same bits. Loop thread only.
#ifndef ZEROSHARD_WORKER_RANK_PORT_H_
#define ZEROSHARD_WORKER_RANK_PORT_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/trainer.pb.h"
#include "worker/device_shard.h"
#include "worker/engine_context.h"
#include "worker/shard.h"

namespace zeroshard {

class RankPort {
 public:
  // `device`: of a job with a data plane, else null. Gradients and gathered parameters are the
  // rank's own affair there, and only their order and presence are noted.
  RankPort(EngineContext& context, uint32_t rank, DeviceShard* device = nullptr);

  // A stream of this rank opened; the reply goes out when the rank's place in the step is settled.
  void Hello(const trainer::v1::Hello& hello);
  void Submit(const trainer::v1::SessionRequest& request);
  // Posts what can be posted and completes what is complete. Returns whether anything was posted.
  bool Poll();
  // Fails everything that waits, and everything that comes until the next Hello.
  void Fail(const absl::Status& status);
  // The rank's process is gone: it holds nothing of the window any more.
  void Leave();
  // Publishes the parameter epoch in the rank's page.
  void Refresh();

  // When the oldest gradient on the board has waited for other ranks; for the deadline.
  struct Waiting {
    uint32_t unit = 0;
    Tag tag = 0;
    absl::Duration since;
  };
  std::optional<Waiting> OldestScatter() const;

  // Where parameters of a data plane rest on the NVMe tier: what gathers of readable units wait
  // for, oldest first, and that it is there.
  struct WantedShard {
    uint64_t id = 0;
    Shard::Target target;
  };
  std::vector<WantedShard> WantedShards();
  void HasCopied(std::span<const WantedShard> shards);
  // Whether the rank waits for anything.
  bool HasRequests() const { return !posted_.empty() || !queue_.empty() || !puts_.empty(); }

 private:
  using Request = trainer::v1::SessionRequest;
  struct Posted {
    uint64_t id = 0;
    enum class Kind { kGather, kScatter, kPut, kStep } kind = Kind::kGather;
    std::vector<uint32_t> units;
    uint64_t mark = 0;  // tag, put tag or attempt
    absl::Duration since;
    bool alone = false;  // a gather
    // Of a gather for which the shard is copied to the rank.
    std::byte* target = nullptr;
    bool copied = false;
  };

  RankSlot& slot() const { return context_.board().rank(rank_); }
  // How far a new process has taken over from the dead one before it.
  enum class Takeover { kNone, kMicroEnd, kContributions, kFinish };

  // The step in flight; nothing when the rank's process is one from before a drop, whose remaining
  // requests must not be taken for the next step's.
  std::optional<uint64_t> Attempt() const;
  bool HasArrived() const;
  void TakeBackMicroEnd();
  void TakeBackContributions();
  void FinishTakeover();
  void RaiseFence();
  bool FenceSeen() const;
  bool PollHello();
  void ReplyHello();

  absl::Status Gather(const Request& request);
  absl::Status Release(const Request& request);
  absl::Status Put(const Request& request);
  absl::Status CheckQueued(const Request& request) const;
  bool PostQueued();
  // False while it must wait for an earlier gradient of the unit.
  bool PostScatter(const Request& request, uint64_t attempt);
  absl::Status PostStep(const Request& request, uint64_t attempt);
  bool PostPut();

  void PostOrder(uint64_t id, const trainer::v1::Gather& gather);
  void CountGather(uint32_t unit);
  void Pin(uint64_t id, uint32_t unit, int64_t change) const;

  bool IsComplete(const Posted& posted);
  bool IsReadable(uint32_t unit, bool windowed);
  // Whether a gather puts the unit into the window of the host.
  bool IsWindowed(uint32_t unit, bool alone) const;
  // Where the shard goes that a gather waits for; null: it waits for none.
  absl::StatusOr<std::byte*> TargetOf(const trainer::v1::Gather& gather) const;
  void CompleteStep(const Posted& posted);
  void Complete(uint64_t id, RankPage::Outcome outcome);
  void FailRequest(uint64_t id, const absl::Status& status);
  void Record(const Posted& posted);
  absl::Status CheckUnits(const google::protobuf::RepeatedField<uint32_t>& units) const;
  absl::Status CheckWindow(uint64_t offset, uint64_t bytes) const;

  EngineContext& context_;
  const uint32_t rank_;
  RankPage* const page_;
  DeviceShard* const device_;
  std::optional<trainer::v1::Hello> hello_;
  Takeover takeover_ = Takeover::kNone;
  uint64_t fence_ = 0;
  uint64_t drop_ = 0;  // the board's drop_until when the process was answered
  std::deque<Request> queue_;
  std::deque<Request> puts_;
  std::vector<Posted> posted_;
  bool wake_ = false;  // the page changed since the last wake-up
  bool ring_ = false;  // contributions were posted since the doorbells rang last
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_RANK_PORT_H_
