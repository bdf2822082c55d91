// OwnerProcess: another process that has made device memory (memory_owner.cc), to be killed.
#ifndef ZEROSHARD_TESTS_DEVICE_CUDA_OWNER_PROCESS_H_
#define ZEROSHARD_TESTS_DEVICE_CUDA_OWNER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace zeroshard {

// One thread. Killed at the latest with this object.
class OwnerProcess {
 public:
  // Starts `program` with this process's environment and `variables` ("NAME=value") on top; it
  // makes `bytes` of device memory, all of them `value`, and hands the descriptor over.
  static absl::StatusOr<OwnerProcess> Start(const std::string& program, uint64_t bytes,
                                            uint8_t value,
                                            const std::vector<std::string>& variables = {});
  OwnerProcess(OwnerProcess&& other) noexcept;
  OwnerProcess& operator=(OwnerProcess&&) = delete;
  ~OwnerProcess();

  int fd() const { return memory_.get(); }
  // The memory is filled with the next value when this returns.
  absl::Status FillAgain();
  // More fills are enqueued when this returns than a device can do in a moment; each with the next
  // value.
  absl::Status KeepBusy();
  // kill -9, and waits until it is reaped. An error if it had ended by itself.
  absl::Status Kill();

 private:
  OwnerProcess() = default;
  absl::Status Ask(const std::string& request);

  UniqueFd socket_;
  UniqueFd memory_;
  pid_t pid_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_DEVICE_CUDA_OWNER_PROCESS_H_
