#include "server/node_io.h"

#include <sys/stat.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "server/nvme_paths.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

// Whether `path` lies in a directory below `above`, and nothing is mounted between the two.
bool OnDeviceOf(const std::string& path, const std::string& above) {
  std::error_code error;
  const std::string whole = std::filesystem::weakly_canonical(path, error).string();
  const std::string top = std::filesystem::weakly_canonical(above, error).string();
  if (error || !IsBeneath(whole, top)) return false;
  struct stat a = {};
  struct stat b = {};
  return stat(whole.c_str(), &a) == 0 && stat(top.c_str(), &b) == 0 && a.st_dev == b.st_dev;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NodeIo>> NodeIo::Create(const Clock* clock, const Options& options) {
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, CreateSealedMemfd("zeroshard:io", IoBudget::Bytes()));
  ZS_ASSIGN_OR_RETURN(MappedRegion memory,
                      MappedRegion::Map(fd.get(), IoBudget::Bytes(), Access::kReadWrite));
  ZS_ASSIGN_OR_RETURN(IoBudget budget, IoBudget::Format(memory.bytes(), clock));
  std::unique_ptr<NodeIo> io(
      new NodeIo(std::move(fd), std::move(memory), std::move(budget), options));
  ZS_ASSIGN_OR_RETURN(io->directory_, OpenDirectory(options.state_dir));
  absl::StatusOr<IoWriteCounts> counts = IoWriteCounts::Load(io->directory_.get());
  if (!counts.ok()) {
    LogWarn(absl::StrCat("bytes written today are counted from 0: ", counts.status().message()));
  }
  {
    absl::MutexLock lock(&io->mu_);
    counts.ok() ? io->counts_.emplace(*std::move(counts))
                : io->counts_.emplace(io->directory_.get());
  }
  io->saver_ = std::thread([raw = io.get()] { raw->SaveNowAndThen(); });
  return io;
}

NodeIo::~NodeIo() {
  if (!saver_.joinable()) return;
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  saver_.join();
}

void NodeIo::SaveNowAndThen() {
  absl::MutexLock lock(&mu_);
  std::string said;
  while (true) {
    mu_.AwaitWithTimeout(absl::Condition(&stop_), options_.save_interval);
    const absl::Status saved = counts_->Save(budget_);
    const std::string error(saved.message());
    if (!saved.ok() && error != said) {
      LogWarn(absl::StrCat("bytes written today are not saved: ", error));
    }
    said = error;
    if (stop_) return;
  }
}

absl::StatusOr<std::string> NodeIo::AddPath(const std::string& path) const {
  for (uint32_t device = 0; device < budget_.devices(); ++device) {
    const std::string known = budget_.path(device);
    if (known != path && OnDeviceOf(path, known)) return known;
  }
  ZS_ASSIGN_OR_RETURN(const uint32_t device, budget_.AddDevice(path, options_.limits));
  absl::MutexLock lock(&mu_);
  counts_->Restore(budget_, device);
  return path;
}

absl::StatusOr<std::shared_ptr<const IoHolder>> NodeIo::Add(const std::string& job,
                                                            uint32_t worker) const {
  ZS_ASSIGN_OR_RETURN(const uint32_t number, budget_.AddHolder(job, worker));
  return std::make_shared<const IoHolder>(budget_, number);
}

internal::v1::WorkerRegion NodeIo::Describe(const IoHolder& holder) const {
  internal::v1::WorkerRegion region;
  region.set_kind(internal::v1::WorkerRegion::KIND_IO_BUDGET);
  region.set_index(holder.number());
  region.set_bytes(IoBudget::Bytes());
  return region;
}

}  // namespace zeroshard
