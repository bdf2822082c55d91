// DaemonProcess: a zeroshardd of this build, in a folder of its own, for as long as the object
// lives.
#ifndef ZEROSHARD_TESTS_BENCH_DAEMON_PROCESS_H_
#define ZEROSHARD_TESTS_BENCH_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard::bench {

class DaemonProcess {
 public:
  // `program` is the caller's argv[0]: the daemon is found in the same build tree. One worker a job
  // for each device ("cpu:0"). Returns once the daemon listens. Must be called before this process
  // has threads. `metrics_address`: as in the daemon's configuration.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(
      const std::string& program, const std::vector<std::string>& devices,
      const std::string& metrics_address = "off");
  // Ends the daemon with all its jobs and removes its folder.
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  std::string socket() const { return folder_ + "/run/zeroshardd.sock"; }
  pid_t pid() const { return pid_; }

 private:
  explicit DaemonProcess(std::string folder) : folder_(std::move(folder)) {}
  absl::Status Spawn(const std::string& tree, const std::vector<std::string>& devices,
                     const std::string& metrics_address);
  absl::Status AwaitSocket();

  const std::string folder_;
  pid_t pid_ = -1;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_DAEMON_PROCESS_H_
