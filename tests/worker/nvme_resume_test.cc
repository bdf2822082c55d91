// Durability power: a job whose regions are lost goes on from its files.
//
// Real engines write through a log of writes and flushes. From what a disk may hold after a loss of
// power at any point of it, a new job resumes at the step that was committed or the one after it,
// and ends with the bits of the job that nobody disturbed. ZEROSHARD_POWER_STATES: how many of the
// states are tried, "all" for every one.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/fault_point.h"
#include "base/unique_fd.h"
#include "storage/extent_file.h"
#include "storage/io_queue.h"
#include "tests/fakes/faulty_io_queue.h"
#include "tests/fakes/local_job.h"
#include "tests/fakes/power_loss_log.h"
#include "tests/storage/nvme_fixture.h"

namespace zeroshard {
namespace {

constexpr uint32_t kRanks = 2;
constexpr uint64_t kSteps = 3;
const std::vector<uint64_t> kSizes = {5, 700, 2000};

struct Variant {
  uint32_t stage = 2;
  uint32_t workers = 2;
  bool parameters = false;   // on the tier
  uint64_t put_before = 99;  // step before which all parameters are put anew
  model::v1::DType dtype = model::v1::DTYPE_BFLOAT16;
};

LocalJobOptions OptionsOf(const Variant& v, const std::string& path) {
  LocalJobOptions options;
  options.manifest = MakeManifest(kSizes, v.dtype);
  options.config = MakeConfig(v.stage, kRanks, v.dtype);
  options.config.set_sub_group_elements(1024 * v.workers);
  options.workers = v.workers;
  UseNvme(options.config, 1, v.parameters);
  options.config.mutable_nvme()->set_durability(model::v1::DURABILITY_POWER);
  if (v.parameters) options.config.set_window(model::v1::WINDOW_COPY);
  options.nvme_paths = {path};
  return options;
}

std::vector<std::vector<float>> ValuesOf(float seed) {
  std::vector<std::vector<float>> values;
  for (const uint64_t size : kSizes) {
    values.emplace_back(size);
    for (uint64_t i = 0; i < size; ++i) {
      values.back()[i] = seed + 0.001f * static_cast<float>(i % 91);
    }
  }
  return values;
}

std::string UserState(uint64_t step, uint32_t rank) {
  return absl::StrCat("rank ", rank, " after step ", step, std::string(700, 'x'));
}

// Everything up to the step requests; the values of step `step` + 1.
void BringStep(LocalJob& job, const Variant& v, uint64_t step) {
  if (step == v.put_before) job.PutParameters(ValuesOf(-0.5f));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    job.ScatterAll(rank, 0, ValuesOf(0.1f * static_cast<float>(step + 2 * rank + 1)));
  }
  job.Run();
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    job.Step(rank, 1, 0.01, UserState(step + 1, rank));
  }
}

void Train(LocalJob& job, const Variant& v, uint64_t from) {
  for (uint64_t step = from; step < kSteps; ++step) {
    BringStep(job, v, step);
    job.Run();
    ASSERT_EQ(job.result(0).step, step + 1);
  }
}

// The log of all that a job writes below one path.
class Recorder {
 public:
  explicit Recorder(std::string directory) : directory_(std::move(directory)) {}

  void WatchFiles() {
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      const std::string name = entry.path().filename();
      if (!name.ends_with(".extent") && !name.ends_with(".manifest")) continue;
      UniqueFd fd(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
      log_.Watch(fd.get());
      names_[PowerLossLog::IdOf(fd.get())] = name;
      if (name.ends_with(".manifest")) manifests_.push_back({std::move(fd), Read(entry.path())});
    }
  }

  // Manifests are written, and flushed, by calls that nobody sees: what has changed since the last
  // look is one of these.
  void Look() {
    for (auto& [fd, before] : manifests_) {
      const std::string now = Read(absl::StrCat("/proc/self/fd/", fd.get()));
      if (now == before) continue;
      size_t begin = 0;
      while (now[begin] == before[begin]) ++begin;
      size_t end = now.size();
      while (now[end - 1] == before[end - 1]) --end;
      begin = begin / kSectorBytes * kSectorBytes;
      end = (end + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
      const auto bytes = std::as_bytes(std::span(now)).subspan(begin, end - begin);
      log_.End(log_.BeginWrite(fd.get(), begin, bytes));
      log_.End(log_.BeginSync(fd.get()));
      before = now;
    }
  }

  PowerLossLog& log() { return log_; }
  const PowerLossLog& log() const { return log_; }
  const std::string& NameOf(const PowerLossLog::FileId& file) const { return names_.at(file); }

 private:
  static std::string Read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  const std::string directory_;
  PowerLossLog log_;
  std::map<PowerLossLog::FileId, std::string> names_;
  std::vector<std::pair<UniqueFd, std::string>> manifests_;
};

// Looks at the manifests before each operation.
class LookingQueue final : public IoQueue {
 public:
  LookingQueue(std::unique_ptr<IoQueue> inner, Recorder& recorder)
      : inner_(std::move(inner)), recorder_(recorder) {}
  absl::Status Submit(const IoTransfer& transfer) override {
    recorder_.Look();
    return inner_->Submit(transfer);
  }
  std::vector<IoCompletion> Wait(size_t min, const Deadline& deadline) override {
    return inner_->Wait(min, deadline);
  }
  std::vector<uint64_t> Close(const Deadline& deadline) override { return inner_->Close(deadline); }
  size_t depth() const override { return inner_->depth(); }
  size_t in_flight() const override { return inner_->in_flight(); }
  std::string description() const override { return inner_->description(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  Recorder& recorder_;
};

void WriteFiles(const Recorder& recorder, const PowerLossLog::State& state,
                const std::string& path) {
  std::filesystem::create_directory(path + "/zeroshard");
  std::filesystem::permissions(path + "/zeroshard", std::filesystem::perms::owner_all);
  for (const auto& [file, bytes] : state.files) {
    std::ofstream out(absl::StrCat(path, "/zeroshard/", recorder.NameOf(file)), std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
  }
}

// How many of the states are tried.
size_t Wanted(size_t in_short_form) {
  const std::string given = Env("ZEROSHARD_POWER_STATES").value_or("");
  size_t wanted = in_short_form;
  if (given == "all") return std::numeric_limits<size_t>::max();
  EXPECT_TRUE(given.empty() || absl::SimpleAtoi(given, &wanted)) << given;
  return wanted;
}

class NvmeResumeTest : public ::testing::TestWithParam<Variant> {
 protected:
  // What an undisturbed job holds after each step.
  void TrainUndisturbed() {
    const DiskDir directory("/dev/shm");  // a disk may be slow
    Variant calm = GetParam();
    LocalJob job(OptionsOf(calm, directory.path()));
    job.PutParameters(ValuesOf(0.5f));
    expected_.push_back(job.StateBytes());
    for (uint64_t step = 0; step < kSteps; ++step) {
      BringStep(job, calm, step);
      job.Run();
      expected_.push_back(job.StateBytes());
    }
  }

  // The job to its end, with its writes in the log.
  void TrainLogged(LocalJob& job, Recorder& recorder, uint64_t from = 0) {
    const Variant& v = GetParam();
    uint64_t marked = from;
    for (uint64_t step = from; step < kSteps; ++step) {
      BringStep(job, v, step);
      for (int round = 0; round < 1000 && job.result(0).step != step + 1; ++round) {
        for (uint32_t w = 0; w < v.workers; ++w) {
          job.RunWorker(w);
          recorder.Look();
          const uint64_t committed = job.memory(0).board().numbers().step;
          if (committed != marked) recorder.log().Mark(marked = committed);
        }
      }
      ASSERT_EQ(job.result(0).step, step + 1);
      job.Run();
    }
  }

  // Options of a job whose writes are logged.
  LocalJobOptions Logged(const std::string& path, Recorder& recorder) {
    LocalJobOptions options = OptionsOf(GetParam(), path);
    options.make_queue =
        [&recorder](uint32_t,
                    const IoQueueOptions& queue) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
      auto inner = MakeIoQueue(IoBackend::kThreads, queue);
      if (!inner.ok()) return inner.status();
      return std::make_unique<LookingQueue>(
          std::make_unique<FaultyIoQueue>(*std::move(inner), std::vector<IoFault>{}, 1,
                                          &recorder.log()),
          recorder);
    };
    return options;
  }

  // Calls `visit` with about `wanted` of the states that are possible, and a directory of each.
  using Visit = std::function<void(const std::string& path, uint64_t committed)>;
  size_t Losses(const Recorder& recorder, size_t wanted, const Visit& visit) {
    const bool long_form = wanted == std::numeric_limits<size_t>::max();
    const PowerLossLog::Options enumeration{.whole_subsets = long_form ? size_t{512} : 64,
                                            .tears = long_form ? size_t{24} : 6};
    const size_t all = recorder.log().ForEachState(enumeration, [](const auto&) {});
    const size_t stride = std::max<size_t>(1, all / std::max<size_t>(1, wanted));
    size_t at = 0;
    recorder.log().ForEachState(enumeration, [&](const PowerLossLog::State& state) {
      if (at++ % stride != 0 || HasFatalFailure()) return;
      SCOPED_TRACE(state.what);
      const DiskDir lost("/dev/shm");
      WriteFiles(recorder, state, lost.path());
      visit(lost.path(), state.mark);
    });
    return all;
  }

  // `committed` steps were committed when the power went.
  void Resume(const std::string& path, uint64_t committed) {
    LocalJobOptions options = OptionsOf(GetParam(), path);
    const absl::StatusOr<ManifestState> state = LocalJob::Resumable(options);
    if (!state.ok() && committed == 0) return;  // it begins anew
    ASSERT_TRUE(state.ok()) << state.status();
    ASSERT_GE(state->step, committed);
    ASSERT_LE(state->step, committed + 1);
    ++resumed_[state->step - committed];
    options.resume = true;
    LocalJob job(options);
    const uint64_t step = state->step;
    // Perhaps what was put then is part of the state already, and it is put once more.
    const bool put_anew = step == GetParam().put_before;
    ASSERT_TRUE(put_anew || job.StateBytes() == expected_[step])
        << "step " << step << " revision " << state->revision << ", committed " << committed;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ASSERT_EQ(job.hello(rank).step(), step);
      ASSERT_TRUE(job.hello(rank).initialized());
      ASSERT_EQ(job.hello(rank).user_state(), step > 0 ? UserState(step, rank) : "");
    }
    Train(job, GetParam(), step);
    ASSERT_TRUE(job.StateBytes() == expected_[kSteps]);
  }

  std::vector<std::string> expected_;
  std::map<uint64_t, uint64_t> resumed_;  // by steps beyond the committed one
};

TEST_P(NvmeResumeTest, FromWhateverALossOfPowerLeaves) {
  TrainUndisturbed();
  const DiskDir directory("/dev/shm");  // a disk may be slow
  Recorder recorder(directory.path() + "/zeroshard");
  {
    LocalJob job(Logged(directory.path(), recorder));
    recorder.WatchFiles();
    job.PutParameters(ValuesOf(0.5f));
    TrainLogged(job, recorder);
    ASSERT_TRUE(job.StateBytes() == expected_[kSteps]);
  }
  const size_t all = Losses(recorder, Wanted(150),
                            [&](const std::string& path, uint64_t step) { Resume(path, step); });
  EXPECT_GT(resumed_[0], 0u);
  EXPECT_GT(resumed_[1], 0u) << "also states in which the step was whole before its commit";
  std::cout << all << " states\n";
}

// The power is lost a second time, while the job resumes or after that.
TEST_P(NvmeResumeTest, FromALossOfPowerAfterAnother) {
  TrainUndisturbed();
  const DiskDir directory("/dev/shm");
  Recorder first(directory.path() + "/zeroshard");
  {
    LocalJob job(Logged(directory.path(), first));
    first.WatchFiles();
    job.PutParameters(ValuesOf(0.5f));
    TrainLogged(job, first);
  }
  size_t all = 0;
  Losses(first, 12, [&](const std::string& path, uint64_t committed) {
    LocalJobOptions options = OptionsOf(GetParam(), path);
    const absl::StatusOr<ManifestState> state = LocalJob::Resumable(options);
    if (!state.ok()) return;
    Recorder second(path + "/zeroshard");
    second.WatchFiles();
    options = Logged(path, second);
    options.resume = true;
    {
      LocalJob job(options);
      second.Look();
      second.log().Mark(state->step);
      TrainLogged(job, second, state->step);
    }
    all += Losses(second, Wanted(25), [&](const std::string& again, uint64_t step) {
      Resume(again, std::max(step, committed));
    });
  });
  EXPECT_GT(resumed_[0], 0u);
  std::cout << all << " states\n";
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, NvmeResumeTest,
    ::testing::Values(Variant{}, Variant{.stage = 1, .workers = 3},
                      Variant{.stage = 3, .parameters = true},
                      Variant{.stage = 3, .workers = 1, .dtype = model::v1::DTYPE_FLOAT32},
                      Variant{.put_before = 2}));

void Flip(const std::string& path, uint64_t offset) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(offset));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ 0x10));
}

TEST(NvmeResumeDamageTest, AFlippedManifestIsTheStepBeforeOrNone) {
  const DiskDir directory("/dev/shm");  // a disk may be slow
  const Variant v{};
  LocalJobOptions options = OptionsOf(v, directory.path());
  std::string whole;
  {
    LocalJob job(options);
    job.PutParameters(ValuesOf(0.5f));
    Train(job, v, 0);
    whole = job.StateBytes();
  }
  EXPECT_EQ(LocalJob::Resumable(options)->step, kSteps);
  // Copies take turns: that of the initial values is the first, so is that of step 2.
  const std::string manifest = directory.Own(ManifestFileName(0x5eed, 1));
  const uint64_t copy = std::filesystem::file_size(manifest) / 2;
  Flip(manifest, copy + 600);
  EXPECT_EQ(LocalJob::Resumable(options)->step, kSteps - 1);
  options.resume = true;
  {
    LocalJob job(options);
    EXPECT_EQ(job.hello(0).step(), kSteps - 1);
    Train(job, v, kSteps - 1);
    EXPECT_TRUE(job.StateBytes() == whole);
  }
  Flip(manifest, 600);
  Flip(manifest, copy + 600);
  const absl::Status none = LocalJob::Resumable(options).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kDataLoss) << none;
}

// A worker that dies while it resumes leaves what it found, or that with the same state twice.
TEST(NvmeResumeKillTest, AtEveryFaultPoint) {
  if (FaultPointNames().empty()) GTEST_SKIP() << "needs --config=faults";
  const Variant v{};
  for (const std::string point :
       {"worker.resume.before_manifest", "worker.resume.after_manifest"}) {
    for (const int hit : {1, 2}) {
      const DiskDir directory("/dev/shm");
      LocalJobOptions options = OptionsOf(v, directory.path());
      std::string whole;
      {
        LocalJob job(options);
        job.PutParameters(ValuesOf(0.5f));
        Train(job, v, 0);
        whole = job.StateBytes();
      }
      options.resume = true;
      const pid_t child = fork();
      if (child == 0) {
        ResetFaultPoints();
        const absl::Status armed = ArmFaultPoints(absl::StrCat(point, "=kill:", hit));
        LocalJob job(options);
        _exit(armed.ok() ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status)) << point << " hit " << hit;
      LocalJob job(options);
      EXPECT_EQ(job.hello(0).step(), kSteps);
      EXPECT_TRUE(job.StateBytes() == whole);
    }
  }
}

}  // namespace
}  // namespace zeroshard
