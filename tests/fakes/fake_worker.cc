// A worker that serves no session: for tests of the server. What it does is chosen by the job's
// name, which the server passes on the command line; parts are separated by dots:
//
//   exit     ends with code 3 before it is ready        fatal    says that it cannot go on, then
//   ends hang     never becomes ready                        flaky    the first incarnation ends
//   when ready mute     does not answer Save, Restore, Export      poison   poisons the generation
//   of every rank
//
// Otherwise it becomes ready, counts a step a second in its Stats, answers Save and Restore with an
// error and writes "fake" into an exported file.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/fd_passing.h"
#include "base/unique_fd.h"
#include "proto/internal.pb.h"
#include "proto/worker_link.h"
#include "worker/control_link.h"

namespace zeroshard {
namespace {

using internal::v1::FromWorker;
using internal::v1::ToWorker;

constexpr int kExitCode = 3;

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

int Serve(ControlLink& link, const Arguments& arguments) {
  FromWorker ready;
  ready.mutable_ready()->set_recovery(arguments.incarnation > 1 ? "nothing to recover" : "");
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
  const Arguments arguments = Parse(argc, argv);
  ControlLink link{UniqueFd(kWorkerLinkFd)};
  absl::StatusOr<ControlLink::Start> start = link.ReceiveStart(absl::Seconds(30));
  if (!start.ok() || arguments.Has("exit")) return kExitCode;
  if (arguments.Has("hang")) pause();
  if (arguments.Has("fatal")) {
    FromWorker fatal;
    fatal.mutable_fatal()->set_code(static_cast<uint32_t>(absl::StatusCode::kDataLoss));
    fatal.mutable_fatal()->set_message("the partition is not this job's");
    link.Send(fatal).IgnoreError();
    return kExitCode;
  }
  return Serve(link, arguments);
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
