// Drives that fail under a job: a step goes on as if nothing had been, or says what is wrong,
// leaves the committed state, and is done when the drive is well again.
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "base/deadline.h"
#include "base/status.h"
#include "storage/io_backend.h"
#include "tests/fakes/faulty_io_queue.h"
#include "tests/storage/nvme_fixture.h"
#include "tests/worker/state_forms.h"

namespace zeroshard {
namespace {

constexpr uint32_t kSteps = 4;
constexpr uint32_t kWorkers = 2;
constexpr uint32_t kFaultyWorker = 1;

const StateForm& Form() { return AllStateForms()[0]; }

const std::string& Expected(uint32_t steps = kSteps) {
  static std::string expected[kSteps + 1];
  if (expected[steps].empty()) {
    const auto job = StartStateJob(Form(), {});
    TrainSteps(*job, 0, steps);
    expected[steps] = job->StateBytes();
  }
  return expected[steps];
}

// Whether transfers fail, and what happens at the next that does.
struct Switch {
  bool broken = false;
  std::function<void()> then = {};
};

class SwitchedQueue final : public IoQueue {
 public:
  SwitchedQueue(std::unique_ptr<IoQueue> inner, Switch& power)
      : inner_(std::move(inner)), switch_(power) {}
  absl::Status Submit(const IoTransfer& transfer) override {
    if (!switch_.broken) return inner_->Submit(transfer);
    if (const auto then = std::exchange(switch_.then, {})) then();
    failed_.push_back({transfer.tag, ErrnoErrorAt(EIO, "write", "file", 8192)});
    return absl::OkStatus();
  }
  std::vector<IoCompletion> Wait(size_t min, const Deadline& deadline) override {
    std::vector<IoCompletion> failed = std::exchange(failed_, {});
    std::vector<IoCompletion> all =
        inner_->Wait(failed.size() >= min ? 0 : min - failed.size(), deadline);
    all.insert(all.end(), failed.begin(), failed.end());
    return all;
  }
  std::vector<uint64_t> Close(const Deadline& deadline) override { return inner_->Close(deadline); }
  size_t depth() const override { return inner_->depth(); }
  size_t in_flight() const override { return inner_->in_flight() + failed_.size(); }
  std::string description() const override { return inner_->description(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  Switch& switch_;
  std::vector<IoCompletion> failed_;
};

// What each worker's queue is made by; `wrap` is for that of the faulty one.
template <typename Wrap>
auto QueuesWith(Wrap wrap) {
  return [wrap](uint32_t worker,
                const IoQueueOptions& options) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
    auto queue = MakeIoQueue(IoBackend::kThreads, options);
    if (!queue.ok() || worker != kFaultyWorker) return queue;
    return wrap(*std::move(queue));
  };
}

StateVariant Variant(const DiskDir& directory, bool parameters) {
  return {.stage = 3,
          .workers = kWorkers,
          .copy = true,
          .nvme_paths = {directory.path()},
          .parameters = parameters};
}

// The reason why the ranks' requests failed, or nothing.
std::string Failure(LocalJob& job) {
  const auto& failures = job.failures(0);
  return failures.empty() ? "" : failures.back().message();
}

// All ranks leave and others come.
void StartAgain(LocalJob& job) {
  const uint64_t generation = job.next_generation();
  for (uint32_t w = 0; w < kWorkers; ++w) job.engine(w).OnDropAttempt(generation);
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job.failures(rank).clear();
  job.Run();
}
void Attach(LocalJob& job) {
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job.Hello(rank, /*reconnect=*/false);
  job.Run();
}

void ArriveAt(LocalJob& job, uint32_t step) {
  ScatterStep(job, step);
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job.Step(rank, 1, 0.01);
  job.Run();
}

TEST(NvmeJobFaultsTest, AnyOperationMayFailOnce) {
  bool injected = true;
  uint64_t at = 0;
  for (; injected; at += 7) {
    const DiskDir directory("/dev/shm");
    LocalJobOptions options = StateOptions(Form(), Variant(directory, at % 2 == 0));
    FaultyIoQueue* faulty = nullptr;
    options.make_queue = QueuesWith([&](std::unique_ptr<IoQueue> inner) {
      auto queue =
          std::make_unique<FaultyIoQueue>(std::move(inner), std::vector<IoFault>{{.at = at}}, at);
      faulty = queue.get();
      return queue;
    });
    const auto job = StartStateJob(options);
    TrainSteps(*job, 0, kSteps);
    injected = faulty->injected() > 0;
    ASSERT_TRUE(job->StateBytes() == Expected()) << "operation " << at;
  }
  EXPECT_GT(at, 100u);
}

// A job whose faulty worker's drive fails from its third step on. `drive` must outlive it.
std::unique_ptr<LocalJob> FailThirdStep(const StateVariant& variant, Switch& drive) {
  LocalJobOptions options = StateOptions(Form(), variant);
  options.make_queue = QueuesWith([&drive](std::unique_ptr<IoQueue> inner) {
    return std::make_unique<SwitchedQueue>(std::move(inner), drive);
  });
  auto job = StartStateJob(options);
  TrainSteps(*job, 0, 2);
  drive.broken = true;
  ArriveAt(*job, 2);
  return job;
}

TEST(NvmeJobFaultsTest, AStepThatFailedIsDoneOnceTheDriveIsWell) {
  for (const bool parameters : {false, true}) {
    const DiskDir directory("/dev/shm");
    Switch drive;
    const auto job = FailThirdStep(Variant(directory, parameters), drive);
    const std::string reason = Failure(*job);
    EXPECT_TRUE(absl::StrContains(reason, "step 3 of job local")) << reason;
    EXPECT_TRUE(absl::StrContains(reason, "offset 8192")) << reason;
    EXPECT_TRUE(absl::IsUnavailable(job->engine(0).context().poison())) << "nothing is lost";
    EXPECT_EQ(job->memory(0).board().numbers().step, 2u);
    StartAgain(*job);
    EXPECT_TRUE(job->engine(0).context().poison().ok()) << "nobody is there to be told";
    Attach(*job);
    EXPECT_FALSE(job->engine(0).context().poison().ok()) << "still broken";
    EXPECT_EQ(job->memory(0).board().numbers().step, 2u);
    StartAgain(*job);
    drive.broken = false;
    Attach(*job);  // at once, not after another failure
    EXPECT_EQ(job->memory(0).board().numbers().step, 3u);
    EXPECT_TRUE(job->StateBytes() == Expected(3));
    TrainSteps(*job, 3, kSteps);
    EXPECT_TRUE(job->StateBytes() == Expected());
  }
}

// An attempt that began while nobody was there says nothing about the drive that they find.
TEST(NvmeJobFaultsTest, WhoComesDuringAFailingAttemptIsNotToldOfIt) {
  const DiskDir directory("/dev/shm");
  Switch drive;
  const auto job = FailThirdStep(Variant(directory, /*parameters=*/false), drive);
  ASSERT_FALSE(Failure(*job).empty());
  bool came = false;
  drive.then = [&] {
    const Board& board = job->memory(0).board();
    board.rank(0).attached.store(board.header().generation.load() + 1);  // as its worker does
    drive.broken = false;
    came = true;
  };
  StartAgain(*job);
  EXPECT_TRUE(came);
  EXPECT_TRUE(job->engine(0).context().poison().ok()) << job->engine(0).context().poison();
  EXPECT_EQ(job->memory(0).board().numbers().step, 3u) << "tried anew for who has come";
  EXPECT_TRUE(job->StateBytes() == Expected(3));
}

// Reads all states of the faulty worker.
absl::Status ReadAll(LocalJob& job) {
  const Shard& shard = job.engine(kFaultyWorker).shard();
  for (uint32_t u = 0; u < job.layout().units().size(); ++u) {
    const std::vector<StateArray> arrays = shard.StateArrays(u, Shard::Extent::kShard);
    std::vector<std::vector<std::byte>> bytes(arrays.size());
    const GrainRange all{0, job.layout().units()[u].grains};
    if (absl::Status status = shard.ReadArrays(u, arrays, all, bytes); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// One operation of the second step and later ones goes wrong without a word.
void TrainWithDamage(const IoFault& fault, int& damaged) {
  const DiskDir directory("/dev/shm");
  LocalJobOptions options = StateOptions(Form(), Variant(directory, /*parameters=*/false));
  std::vector<IoFault> faults;
  options.make_queue = QueuesWith([&](std::unique_ptr<IoQueue> inner) {
    return std::make_unique<FaultyIoQueue>(std::move(inner), faults, 5);
  });
  const auto job = StartStateJob(options);
  TrainSteps(*job, 0, 1);
  faults = {fault};
  job->RestartWorker(kFaultyWorker);  // which makes a new queue
  faults.clear();
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job->Reconnect(rank);
  uint32_t step = 1;
  for (; step < kSteps && Failure(*job).empty(); ++step) ArriveAt(*job, step);
  if (Failure(*job).empty()) {
    const absl::Status status = ReadAll(*job);
    if (status.ok()) {
      EXPECT_TRUE(job->StateBytes() == Expected());
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    }
    return;
  }
  ++damaged;
  EXPECT_TRUE(absl::StrContains(Failure(*job), ".extent at offset")) << Failure(*job);
  EXPECT_TRUE(absl::IsDataLoss(job->engine(0).context().poison()));
  EXPECT_GT(job->engine(kFaultyWorker).Stats().nvme_damaged_images(), 0u);
  const uint64_t committed = job->memory(0).board().numbers().step;
  EXPECT_EQ(committed, step - 1);
  // It may lie on the superblock, and no worker starts on such a file.
  if (fault.kind == IoFaultKind::kMisdirect) return;
  job->RestartWorker(kFaultyWorker);
  StartAgain(*job);
  Attach(*job);
  EXPECT_FALSE(job->engine(0).context().poison().ok()) << "what is lost does not come back";
  EXPECT_EQ(job->memory(0).board().numbers().step, committed);
}

TEST(NvmeJobFaultsTest, WhatIsDamagedIsNamed) {
  for (const IoFaultKind kind :
       {IoFaultKind::kFlip, IoFaultKind::kTorn, IoFaultKind::kLost, IoFaultKind::kMisdirect}) {
    int damaged = 0;
    for (uint64_t at = 0; at < 100; at += 3) TrainWithDamage({at, kind}, damaged);
    EXPECT_GT(damaged, 0) << static_cast<int>(kind);
  }
}

std::vector<float> Window(uint32_t steps) {
  const auto job = StartStateJob(Form(), {});
  TrainSteps(*job, 0, steps);
  return WindowOf(*job, 0);
}

// Parameters are their rounded master: what is damaged of them is made anew, bit for bit.
TEST(NvmeJobFaultsTest, DamagedParametersAreMadeAnewOfTheirMasters) {
  const DiskDir directory("/dev/shm");
  const auto job = StartStateJob(StateOptions(Form(), Variant(directory, /*parameters=*/true)));
  const auto damaged = [&] { return job->engine(kFaultyWorker).Stats().nvme_damaged_images(); };
  TrainSteps(*job, 0, 2);
  ASSERT_EQ(DamageParameters(*job, kFaultyWorker, directory.path(), 1), 1u);
  EXPECT_TRUE(job->StateBytes() == Expected(2));
  const uint64_t found = damaged();
  EXPECT_GT(found, 0u);
  EXPECT_EQ(job->engine(kFaultyWorker).Stats().nvme_rebuilt_images(), 1u);
  EXPECT_TRUE(job->StateBytes() == Expected(2));
  EXPECT_EQ(damaged(), found) << "it is well";
  TrainSteps(*job, 2, 3);
  ASSERT_GT(DamageParameters(*job, kFaultyWorker, directory.path(), ~size_t{0}), 1u);
  job->RestartWorker(kFaultyWorker);
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job->Reconnect(rank);
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) GatherAll(*job, rank);
  job->Run();
  EXPECT_TRUE(WindowOf(*job, 0) == Window(3));
  TrainSteps(*job, 3, kSteps);  // by then more slots have been damaged than there are spare ones
  EXPECT_TRUE(job->StateBytes() == Expected());
}

// Those without one are on the tier twice.
TEST(NvmeJobFaultsTest, DamagedParametersWithoutAMasterAreCopiedAnew) {
  StateForm form = Form();
  form.master = model::v1::MASTER_FORM_NONE;
  const DiskDir directory("/dev/shm");
  const auto job = StartStateJob(StateOptions(form, Variant(directory, /*parameters=*/true)));
  TrainSteps(*job, 0, 2);
  ASSERT_GT(DamageParameters(*job, kFaultyWorker, directory.path(), ~size_t{0}), 1u);
  EXPECT_TRUE(job->StateBytes() == TrainedStates(form, {}, 2));
  EXPECT_GT(job->engine(kFaultyWorker).Stats().nvme_damaged_images(), 0u);
}

}  // namespace
}  // namespace zeroshard
