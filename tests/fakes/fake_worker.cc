// A worker that serves no session: for tests of the server. What it does is chosen by the job's
// name, which the server passes on the command line; parts are separated by dots:
//
//   exit     ends with code 3 before it is ready
//   fatal    says that it cannot go on, then ends
//   hang     never becomes ready
//   flaky    the first incarnation ends when it is ready
//   mute     does not answer Save, Restore, Export
//   poison   poisons the generation of every rank
//   full     says that its GPU is full, then ends
//   forgets  does not hand its device memory over
//
// With --probe it names $ZEROSHARD_FAKE_GPUS GPUs, the third of which is a MIG slice. The device
// memory of a job on GPUs is memfds.
//
// Otherwise it becomes ready, counts a step a second in its Stats, answers Save and Restore with an
// error and writes "fake" into an exported file.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/config.h"
#include "base/fd_passing.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "proto/internal.pb.h"
#include "proto/worker_link.h"
#include "worker/control_link.h"

namespace zeroshard {
namespace {

using internal::v1::FromWorker;
using internal::v1::ToWorker;

constexpr int kExitCode = 3;
constexpr int kMigSlice = 2;
// More than the small jobs of tests plan.
constexpr uint64_t kDeviceBytes = uint64_t{256} << 20;

struct Arguments {
  std::string job;
  int worker = 0;
  int incarnation = 1;

  bool Has(const char* part) const {
    for (const auto& one : absl::StrSplit(job, '.')) {
      if (one == part) return true;
    }
    return false;
  }
};

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (absl::StartsWith(text, "--job=")) arguments.job = text.substr(6);
    if (absl::StartsWith(text, "--worker=")) arguments.worker = std::atoi(text.c_str() + 9);
    if (absl::StartsWith(text, "--incarnation=")) {
      arguments.incarnation = std::atoi(text.c_str() + 14);
    }
  }
  return arguments;
}

void Answer(ControlLink& link, const ControlLink::Command& command, const Arguments& arguments) {
  FromWorker reply;
  internal::v1::ShardDone& done = *reply.mutable_shard_done();
  done.set_step(7);
  if (command.message.has_export_file()) {
    done.set_request(command.message.export_file().request());
    if (arguments.worker == 0 && write(command.fds.front().get(), "fake", 4) == 4) {
      done.set_bytes(4);
    }
  } else {
    done.set_request(command.message.has_save() ? command.message.save().request()
                                                : command.message.restore().request());
    done.set_code(static_cast<uint32_t>(absl::StatusCode::kUnimplemented));
    done.set_message("a fake has no state");
  }
  link.Send(reply).IgnoreError();
}

int AnswerProbe() {
  const int gpus = std::atoi(Env("ZEROSHARD_FAKE_GPUS").value_or("0").c_str());
  if (gpus == 0) {
    std::cerr << "zeroshard-worker: no CUDA device: libcuda.so.1 is not there; install a driver\n";
    return 1;
  }
  for (int i = 0; i < gpus; ++i) {
    const bool usable = i != kMigSlice;
    std::cout << "{\"device\":\"cuda:" << i << "\",\"name\":\"Fake GPU\",\"uuid\":\"GPU-0000000"
              << i << "-0000-0000-0000-000000000000\",\"pci\":\"0000:0" << i
              << ":00.0\",\"compute_capability\":\"9.0\",\"memory_bytes\":1073741824,"
              << "\"numa_node\":-1,\"usable\":" << (usable ? "true" : "false") << ",\"problem\":\""
              << (usable ? "" : "cuda:2 is a MIG slice") << "\"}\n";
  }
  return 0;
}

// What a worker on a GPU does before it is ready: makes its device memory, or finds that of its
// predecessor. Says which.
std::string SetUpDevice(ControlLink& link, const internal::v1::WorkerStart& start) {
  using internal::v1::WorkerRegion;
  for (const WorkerRegion& region : start.regions()) {
    if (region.kind() == WorkerRegion::KIND_DEVICE_STATES) return "device memory was there";
  }
  FromWorker message;
  std::vector<UniqueFd> owned;
  std::vector<int> fds;
  for (const auto kind : {WorkerRegion::KIND_DEVICE_SHARED, WorkerRegion::KIND_DEVICE_STATES}) {
    absl::StatusOr<UniqueFd> fd = CreateSealedMemfd("fake-device", kDeviceBytes);
    if (!fd.ok()) return std::string(fd.status().message());
    WorkerRegion& region = *message.mutable_device_regions()->add_regions();
    region.set_kind(kind);
    region.set_index(start.worker());
    region.set_bytes(kDeviceBytes);
    fds.push_back(fd->get());
    owned.push_back(*std::move(fd));
  }
  *message.mutable_device_regions()->mutable_device() = start.device();
  SendLinkMessage(link.fd(), message.SerializeAsString(), fds, absl::Seconds(1)).IgnoreError();
  return "";
}

void SayFatal(ControlLink& link, absl::StatusCode code, const std::string& text) {
  FromWorker fatal;
  fatal.mutable_fatal()->set_code(static_cast<uint32_t>(code));
  fatal.mutable_fatal()->set_message(text);
  link.Send(fatal).IgnoreError();
}

int Serve(ControlLink& link, const Arguments& arguments, const internal::v1::WorkerStart& start) {
  FromWorker ready;
  ready.mutable_ready()->set_recovery(arguments.incarnation > 1 ? "nothing to recover" : "");
  if (start.config().data_plane() && !arguments.Has("forgets")) {
    ready.mutable_ready()->set_recovery(SetUpDevice(link, start));
  }
  link.Send(ready).IgnoreError();
  if (arguments.Has("flaky") && arguments.incarnation == 1) return kExitCode;
  uint64_t step = 0;
  while (true) {
    absl::StatusOr<ControlLink::Command> command = link.Receive(absl::Seconds(1));
    if (absl::IsDeadlineExceeded(command.status())) {
      FromWorker stats;
      stats.mutable_stats()->set_step(++step);
      stats.mutable_stats()->set_gather_elements(step * 100);
      stats.mutable_stats()->set_loss_scale(1);
      link.Send(stats).IgnoreError();
      continue;
    }
    if (!command.ok() || command->message.has_stop()) return 0;
    if (command->message.has_rank_attached() && arguments.Has("poison")) {
      FromWorker poisoned;
      poisoned.mutable_poisoned()->set_generation(command->message.rank_attached().generation());
      poisoned.mutable_poisoned()->set_code(static_cast<uint32_t>(absl::StatusCode::kAborted));
      poisoned.mutable_poisoned()->set_message("ranks 0 and 1 gather different units");
      link.Send(poisoned).IgnoreError();
    }
    const bool asked = command->message.has_save() || command->message.has_restore() ||
                       command->message.has_export_file();
    if (asked && !arguments.Has("mute")) Answer(link, *command, arguments);
  }
}

int Main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--probe") == 0) return AnswerProbe();
  const Arguments arguments = Parse(argc, argv);
  ControlLink link{UniqueFd(kWorkerLinkFd)};
  absl::StatusOr<ControlLink::Start> start = link.ReceiveStart(absl::Seconds(30));
  if (!start.ok() || arguments.Has("exit")) return kExitCode;
  if (arguments.Has("hang")) pause();
  if (arguments.Has("fatal")) {
    SayFatal(link, absl::StatusCode::kDataLoss, "the partition is not this job's");
    return kExitCode;
  }
  if (arguments.Has("full")) {
    SayFatal(link, absl::StatusCode::kResourceExhausted, "needs 2.00 GiB of cuda:0, 1.00 GiB free");
    return kExitCode;
  }
  return Serve(link, arguments, start->start);
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
