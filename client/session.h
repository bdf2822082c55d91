// Session: one rank of one job, as a trainer holds it.
//
//   trainer thread(s) --- requests -----> worker    one gRPC stream on a Unix socket, pipelined
//                     <-- completions ---           a shared page: no message, no system call
//                     <== windows ======>           shared memory: parameters in, gradients out
//
// A training step, with every error check left out:
//
//   auto session = Session::Attach(options).value();
//   for each unit, unless session->state().initialized:          // initial values
//     slot = session->AcquireSlot(bytes); write values to it;
//     session->Put({.unit = u, .elements = n, .window_offset = slot, .last = true});
//   for each unit, forward and backward:
//     id = session->Gather({u}); ...; session->Wait(id);        // now readable:
//     read session->parameter_window() at layout().units()[u].window_offset;
//     session->Release({u});
//     slot = session->AcquireSlot(bytes); write the gradient, times loss scale, to it;
//     session->Scatter({.unit = u, .micro_step = m, .window_offset = slot});
//   session->MicroEnd(m);
//   session->Wait(session->Step({.micro_steps = 1}));           // committed on every worker
//
// Requests return at once with a RequestId and complete in any order. A request is an error in two
// places: at the call (the caller's mistake, a dead session) or at its Wait. A failure that nobody
// waited for is not lost: the next Step returns it instead of being sent.
//
// Threads: every method may be called from any thread, except that the session must not be
// destroyed during a call. Requests are sent in the order of the calls. A callback runs on a thread
// of the session and must not block.
//
// Failure: when the worker dies the session reconnects by itself and sends again what was not
// completed; callers only wait longer. When a rank is missing or disagrees, the daemon poisons the
// job's generation: every call then fails with that reason for ever, and the rank must attach
// anew. No call waits for ever: each has a timeout, whose error names the request. On GPUs the
// death of a rank or of its device does the same at once (Aborted): attach again in this process.
//
// Fork: a forked child has no session. Its windows are not mapped, every call fails with
// FailedPrecondition, and destroying the object there does nothing.
#ifndef ZEROSHARD_CLIENT_SESSION_H_
#define ZEROSHARD_CLIENT_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/dataplane/data_plane.h"
#include "storage/layout.h"
#include "storage/rank_page.h"

namespace zeroshard {

namespace model::v1 {
class EngineConfig;  // proto/model.pb.h
}  // namespace model::v1

// Rises by one with every request of a session, from 1.
using RequestId = uint64_t;

// Hyperparameters of one parameter group; torch.optim explains them.
struct GroupHyperparameters {
  double lr = 1e-3;
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;
  bool bias_correction = true;
};

inline constexpr int kWorkersDevice = -1;

struct AttachOptions {
  std::string socket{};                            // of the daemon; empty: see DefaultSocketPath
  std::string job{};                               // [A-Za-z0-9._-]{1,128}
  uint32_t rank = 0;                               // in [0, world_size)
  uint32_t world_size = 1;                         // the same on every rank
  uint32_t local_ranks = 0;                        // ranks on this node; 0: all of them
  std::vector<ParameterSpec> parameters{};         // the same on every rank
  std::vector<GroupHyperparameters> groups{};      // the initial ones
  std::string ds_config = "{}";                    // the text of the ds_config.json
  std::map<std::string, std::string> overrides{};  // dotted key -> JSON text, for "auto" entries
  absl::Duration timeout = absl::Minutes(5);       // to wait for the other ranks and the workers
  bool forward_only = false;                       // no gradients and no optimizer states
  // Of a job on GPUs: the device to train on, as this process counts them; it must be the one of
  // the rank's worker. kWorkersDevice: whichever that is.
  std::optional<int> cuda_device{};
  // Session::device_memory() of this rank's earlier session in this process: units keep their
  // addresses.
  std::shared_ptr<TrainerMemory> device_memory{};
  // Why this process gave that session up, for everybody to read (docs/gpu.md): the error.
  std::string gave_up{};
  // Asked now and then by calls that block; when it returns true they end with Cancelled. Called on
  // the blocked thread, without locks.
  std::function<bool()> interrupted{};
};

// Where the rank stands, as the worker told it when the session opened.
struct SessionState {
  uint64_t step = 0;     // committed steps; the next Step is number step + 1
  uint64_t attempt = 0;  // identity of the step in flight
  uint64_t updates = 0;  // applied optimizer updates
  double loss_scale = 1.0;
  std::string user_state{};  // this rank's bytes, committed with `step`
  bool initialized = false;  // every unit has values: no Put is needed
  bool resumed = false;      // the job existed before this attach
};

// Bytes of one kind of state held against the ZeRO formula; see model.v1.LedgerLine.
struct LedgerEntry {
  std::string state, tier, holder;
  uint64_t bytes = 0;
  uint64_t formula_bytes = 0;
  std::string formula{};
};

struct PutRequest {
  uint32_t unit = 0;
  uint64_t element_offset = 0;  // a multiple of kGrainElements
  uint64_t elements = 0;        // whole grains, or up to the end of the unit
  uint64_t window_offset = 0;   // from AcquireSlot
  bool last = false;            // completes the unit
};

struct GatherOptions {
  bool alone = false;     // without the other ranks: not part of the checked order
  bool prefetch = false;  // ahead of need, along the recorded order
};

struct ScatterRequest {
  uint32_t unit = 0;
  uint32_t micro_step = 0;     // within the step, from 0
  uint64_t window_offset = 0;  // from AcquireSlot
  std::string present{};       // one bit a parameter of the unit, LSB first; empty: all
  float weight = 0.0F;         // 0 means 1
  // Of jobs on GPUs: the slot is a DeviceSlot's offset, and its gradient is complete when what this
  // stream was given so far is done.
  StreamHandle stream = nullptr;
};

struct StepRequest {
  uint32_t micro_steps = 1;
  double weight_total = 0.0;                   // 0: one a micro-step
  std::vector<GroupHyperparameters> groups{};  // empty: those of the previous step or of Attach
  std::string user_state{};
  uint64_t prefetch_hits = 0;
  uint64_t prefetch_misses = 0;
  uint64_t wait_us = 0;
};

struct SaveResult {
  uint64_t step = 0;
  uint64_t bytes = 0;
  std::string directory;
};
struct RestoreResult {
  uint64_t step = 0;
  uint64_t bytes = 0;
  std::string user_state;  // empty when the world size differs
};
struct ExportResult {
  uint64_t step = 0;
  uint64_t bytes = 0;
  std::string path;
};

// $ZEROSHARD_SOCKET, else /run/zeroshard/zeroshardd.sock (root) or that below $XDG_RUNTIME_DIR.
std::string DefaultSocketPath();

class Session {
 public:
  // Joins the job. Blocks until all ranks have attached. InvalidArgument and FailedPrecondition
  // name the key, rank or parameter at fault; Unavailable means that no daemon answers.
  static absl::StatusOr<std::unique_ptr<Session>> Attach(AttachOptions options);

  // Closes the stream without leaving the job: the rank stays this process's until that ends. See
  // Detach.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Constant after Attach.
  const Layout& layout() const;
  const model::v1::EngineConfig& config() const;
  const SessionState& state() const;
  const std::vector<std::string>& warnings() const;
  const std::vector<LedgerEntry>& ledger() const;
  const std::string& scheduler() const;  // JSON text of the config's scheduler block, or empty
  uint64_t generation() const;
  uint32_t rank() const;
  uint32_t world_size() const;
  // Gathered parameters; writing to them is a SIGSEGV. The spans are valid for the session's life.
  std::span<const std::byte> parameter_window() const;
  std::span<std::byte> gradient_window() const;

  // Reserves `bytes` of the gradient window, 64-byte aligned, and returns the offset. The slot is
  // bound to the next Put or Scatter that names the offset, and free again when that request
  // completes. Waits for a slot; DeadlineExceeded when none came free in time.
  absl::StatusOr<uint64_t> AcquireSlot(uint64_t bytes);
  absl::StatusOr<uint64_t> AcquireSlot(uint64_t bytes, absl::Duration timeout);
  // Gives a slot back that no request has named.
  absl::Status AbandonSlot(uint64_t offset);

  // The requests (docs/pages.md and proto/trainer.proto say what each does). At once, unless
  // kMaxPendingRequests are not complete: then they wait for one, up to the default timeout.
  absl::StatusOr<RequestId> Put(const PutRequest& request);
  absl::StatusOr<RequestId> Gather(std::span<const uint32_t> units, GatherOptions options = {});
  absl::StatusOr<RequestId> Release(std::span<const uint32_t> units);
  absl::StatusOr<RequestId> Scatter(const ScatterRequest& request);
  absl::StatusOr<RequestId> MicroEnd(uint32_t micro_step);
  absl::StatusOr<RequestId> Step(const StepRequest& request);

  // Jobs on GPUs (docs/gpu.md). There parameters and gradients are device memory: a gather writes
  // the unit to parameter_address, a gradient is written to the slot of AcquireDeviceSlot, and
  // AcquireSlot's window carries puts only. All ranks gather the same units in the same order;
  // one gathers `alone` through the host's memory, at any time, and the call waits until the values
  // are there. Resident units are no exception of the first: all ranks gather them at the same
  // place. Scatters come in any order, each micro-step before the next one. Other jobs:
  // FailedPrecondition.
  bool on_device() const;
  const DeviceFacts& device() const;  // only where on_device()
  DeviceAddress parameter_address(uint32_t unit) const;
  absl::StatusOr<DeviceSlot> AcquireDeviceSlot(uint64_t bytes);
  absl::Status AbandonDeviceSlot(uint64_t offset);
  // What `stream` is given from now on sees the units as they were gathered last; does not wait.
  // Before each use: also of resident units after a step. Wait(id) of a gather waits until the
  // values are there.
  absl::Status WaitOn(std::span<const uint32_t> units, StreamHandle stream);
  // As Release(units), which is for the default stream: `stream` was given the last use of them.
  absl::StatusOr<RequestId> Release(std::span<const uint32_t> units, StreamHandle stream);
  // Resident units are gathered again, after something but a step or Restore changed parameters
  // (Put). All ranks together.
  absl::Status Refresh();
  // Returns when all ranks have called it.
  absl::Status Barrier();
  std::shared_ptr<TrainerMemory> device_memory() const;
  DataPlaneStats device_stats() const;

  // Returns when the request has completed, with its outcome. Reading a completed one is a load of
  // shared memory. The default timeout is the job's collective timeout and some slack.
  absl::Status Wait(RequestId id);
  absl::Status Wait(RequestId id, absl::Duration timeout);
  // Whether the request has completed, well or not.
  bool Done(RequestId id) const;
  // Calls `callback` with the request's outcome once it has completed, on a thread of the session.
  void OnComplete(RequestId id, std::function<void(absl::Status)> callback);

  // What the last committed step said.
  StepResult step_result() const;
  // Raised with every committed step and restore.
  uint64_t parameter_epoch() const;

  // Calls to the daemon; they block. Save and Restore need a step boundary on all ranks.
  absl::StatusOr<SaveResult> Save(const std::string& name, bool exclude_frozen = false);
  absl::StatusOr<RestoreResult> Restore(const std::string& name, bool parameters_only = false);
  absl::StatusOr<ExportResult> Export(const std::string& name, bool overwrite = false);

  // Leaves the job and ends the session: all later calls fail. The last rank to leave ends the job,
  // unless every rank said kKeep.
  enum class JobState { kEnd, kKeep };
  absl::Status Detach(JobState job_state = JobState::kEnd);
  // Ends the session as the destructor does, but leaves the windows mapped. All later calls fail.
  void Close();

 private:
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_SESSION_H_
