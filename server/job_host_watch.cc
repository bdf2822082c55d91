// The part of JobHost that ends workers which are stuck.
#include <csignal>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "server/job_host.h"

namespace zeroshard {

// A worker that is stopped, or loops for ever, holds up everyone without dying. Killing it is safe:
// its successor goes on from the same memory.
void JobHost::WatchWorkers() {
  watch_timer_.reset();
  if (ended()) return;
  for (uint32_t w = 0; w < workers_.size(); ++w) EndStuckWorker(w);
  watch_timer_ = loop_.At(loop_.Now() + watch_.interval(), [this] { WatchWorkers(); });
}

void JobHost::EndStuckWorker(uint32_t w) {
  Worker& worker = workers_[w];
  if (!worker.process || !regions_) return;
  const ProcessState process = GetProcessState(*worker.process);
  WorkerWatch::Look look;
  look.incarnation = state_.workers[w].incarnation;
  look.progress = regions_->Beats(*plan_, Global(w)) + worker.messages;
  look.starting = state_.workers[w].phase == WorkerPhase::kStarting;
  // Files take as long as the disk does. Under a debugger time stands still.
  look.excused = process.traced || (worker.file_commands > 0 && !process.stopped);
  if (!watch_.IsStuck(w, look)) return;
  worker.stuck = absl::StrCat("process ", worker.process->pid, " had not answered for ",
                              absl::FormatDuration(watch_.bound()),
                              process.stopped ? " (stopped)" : " (stuck)");
  LogWarn(
      absl::StrCat("job ", state_.name, ": worker ", Global(w), ": ", worker.stuck, "; ending it"));
  KillWorker(*worker.process, SIGKILL);
}

}  // namespace zeroshard
