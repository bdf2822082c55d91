#include "server/drive_watch.h"

#include <utility>

namespace zeroshard {
namespace {

PathHealth ReadPath(const std::string& path, const DriveSources& sources) {
  PathHealth health;
  absl::StatusOr<std::vector<std::string>> drives = DrivesBehind(path, sources);
  health.status = drives.status();
  if (!drives.ok()) return health;
  for (const std::string& drive : *drives) {
    health.drives.push_back(ReadDriveHealth(drive, sources));
  }
  return health;
}

}  // namespace

DriveWatch::DriveWatch(DriveSources sources, absl::Duration interval)
    : sources_(std::move(sources)), interval_(interval), thread_([this] { Run(); }) {}

DriveWatch::~DriveWatch() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  thread_.join();
}

void DriveWatch::Watch(const std::vector<std::string>& paths) {
  absl::MutexLock lock(&mu_);
  if (paths == paths_) return;
  paths_ = paths;
  changed_ = true;
}

std::map<std::string, PathHealth> DriveWatch::latest() const {
  absl::MutexLock lock(&mu_);
  return latest_;
}

void DriveWatch::AwaitReading() const {
  absl::MutexLock lock(&mu_);
  const uint64_t wanted = begun_ + 1;
  const auto done = [this, wanted] {
    mu_.AssertReaderHeld();
    return finished_ >= wanted;
  };
  mu_.Await(absl::Condition(&done));
}

bool DriveWatch::HasWork() const { return stop_ || changed_; }

void DriveWatch::Run() {
  for (;;) {
    std::vector<std::string> paths;
    uint64_t reading = 0;
    {
      absl::MutexLock lock(&mu_);
      mu_.AwaitWithTimeout(absl::Condition(this, &DriveWatch::HasWork), interval_);
      if (stop_) return;
      changed_ = false;
      paths = paths_;
      reading = ++begun_;
    }
    std::map<std::string, PathHealth> read;
    for (const std::string& path : paths) read[path] = ReadPath(path, sources_);
    absl::MutexLock lock(&mu_);
    latest_ = std::move(read);
    finished_ = reading;
  }
}

}  // namespace zeroshard
