// IoBudget: what the drives of a node may be asked to do, shared out among the workers of all jobs.
//
// A page of shared memory has an entry for each device (a path of the NVMe tier) with its limits:
// bytes a second, transfers at a time, bytes written a day. A worker asks before each transfer
// and says when it is complete. Whoever wants at the same time gets equal shares: first by job,
// then by worker of the job; what one does not use the others get. Also counts what was moved. How
// the shares are computed, bounds, and why a kill at any instruction leaves nothing to repair:
// docs/io_budget.md.
//
// Owner: the server, which formats the page, makes devices and holders, and calls Release when a
// worker process has ended. Workers map the page read-write. Nothing here blocks or takes a lock.
// Methods may be called from any thread of any process, but those of one holder by one thread at a
// time, and those marked "server" by one thread of the server.
#ifndef ZEROSHARD_STORAGE_IO_BUDGET_H_
#define ZEROSHARD_STORAGE_IO_BUDGET_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace zeroshard {

enum class IoDirection : uint32_t { kRead = 0, kWrite = 1 };

// Of one device; 0 is no limit.
struct IoLimits {
  uint64_t bytes_per_second = 0;  // reads and writes together
  uint32_t depth = 0;             // transfers at a time, at most IoBudget::kMaxDepth
  uint64_t write_budget = 0;      // bytes written in a day (UTC); past it writes are slowed
  friend bool operator==(const IoLimits&, const IoLimits&) = default;
};

// The answer to TryTake.
struct IoTurn {
  bool granted = false;
  absl::Duration wait;  // when not granted: ask again after it, or after an own completion
};

// Bytes written on a day, counted in UTC from 1970-01-01.
struct IoDay {
  int64_t day = 0;
  uint64_t written = 0;
};

enum class IoWarning { kWritesNearBudget, kWritesSlowed };

struct IoBudgetPage;

class IoBudget {
 public:
  static constexpr uint32_t kMaxDevices = 32;
  static constexpr uint32_t kMaxHolders = 254;
  static constexpr uint32_t kMaxDepth = 4096;
  // A device that was idle may be this far ahead of its rate, and one transfer more.
  static constexpr absl::Duration kBurst = absl::Milliseconds(50);
  // Who does not come back this long after its wait was over no longer holds up the others.
  static constexpr absl::Duration kGrace = absl::Milliseconds(20);
  // Who has waited this long with nothing in flight gets a transfer beyond the depth.
  static constexpr absl::Duration kPatience = absl::Seconds(2);
  static constexpr absl::Duration kMaxWait = absl::Seconds(1);
  static constexpr double kNearBudget = 0.9;  // part of the write budget at which to warn

  static size_t Bytes();

  // Formats `memory` (zeroed, at least Bytes() long, aligned to 64). `clock` must outlive the
  // object; all processes need the same (SystemClock outside tests). Server.
  static absl::StatusOr<IoBudget> Format(std::span<std::byte> memory, const Clock* clock);
  // A page that the server formatted. DataLoss when it is none of this version.
  static absl::StatusOr<IoBudget> Adopt(std::span<std::byte> memory, const Clock* clock);

  // The number of the device of `path`, made at first use; the limits are set in either case.
  // InvalidArgument for limits out of range or a path that is empty or longer than PATH_MAX,
  // ResourceExhausted when there are kMaxDevices. Devices live as long as the page. Server.
  absl::StatusOr<uint32_t> AddDevice(std::string_view path, const IoLimits& limits) const;
  uint32_t devices() const;
  std::string path(uint32_t device) const;
  std::optional<uint32_t> FindDevice(std::string_view path) const;
  IoLimits limits(uint32_t device) const;

  // A number from 0 for worker `worker` of `job`; it stays that worker's over all restarts of its
  // process. InvalidArgument for an empty or too long name, ResourceExhausted when all are given
  // out. Server.
  absl::StatusOr<uint32_t> AddHolder(std::string_view job, uint32_t worker) const;
  // The holder's process was reaped: its transfers count as complete. What it moved stays counted.
  // Server.
  void Release(uint32_t holder) const;
  // Release, and gives the number back: the job has ended. Server.
  void RemoveHolder(uint32_t holder) const;

  // May `holder` start a transfer of `bytes` now? Granted bytes are counted as moved. Each granted
  // turn is followed by one Give.
  IoTurn TryTake(uint32_t device, uint32_t holder, uint64_t bytes, IoDirection direction) const;
  // A transfer is complete, well or not.
  void Give(uint32_t device, uint32_t holder) const;
  // The holder does not want the transfer any more that it was told to wait with.
  void Withdraw(uint32_t device, uint32_t holder, IoDirection direction) const;

  struct Usage {
    // Since the page was formatted, by IoDirection.
    uint64_t bytes[2] = {0, 0};
    double wait_seconds = 0;  // of transfers that had to wait
    uint64_t overdrafts = 0;  // transfers beyond the depth, see kPatience
    // Now.
    uint32_t in_flight = 0;  // only counted where there is a depth
    uint32_t waiting = 0;
    // Of the day.
    uint64_t written_today = 0;
    double budget_ratio = 0;  // of write_budget; 0 where there is none
  };
  Usage usage(uint32_t device) const;

  // What jobs have moved, for those that have moved anything at this device.
  struct JobBytes {
    std::string job;
    uint32_t device = 0;
    uint64_t bytes[2] = {0, 0};
  };
  std::vector<JobBytes> job_bytes() const;

  // The day's count, and an earlier one of the same device: added when it is of the same day.
  IoDay today(uint32_t device) const;
  void AddEarlier(uint32_t device, const IoDay& earlier) const;  // server

  // Something to warn of at the device: each once a day. Server.
  std::optional<IoWarning> TakeWarning(uint32_t device) const;

  // For tests: called after every store to the page made through this object.
  void ObserveStores(std::function<void()> observer) { observer_ = std::move(observer); }

 private:
  IoBudget(IoBudgetPage* page, const Clock* clock) : page_(page), clock_(clock) {}
  int64_t NowNanos() const { return absl::ToInt64Nanoseconds(clock_->Elapsed()); }
  int64_t Today() const;

  IoBudgetPage* page_;
  const Clock* clock_;
  std::function<void()> observer_;
};

// The part of a budget that one worker process uses.
struct IoShare {
  IoBudget budget;
  uint32_t holder = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_BUDGET_H_
