// What `zeroshard-worker --probe` answers: which GPUs workers could be started on here.
//
// The server never touches a GPU, so it (and people) ask the worker's program. Nothing is started
// and no context is made on any device.
#ifndef ZEROSHARD_WORKER_DEVICE_PROBE_H_
#define ZEROSHARD_WORKER_DEVICE_PROBE_H_

#include <optional>
#include <span>

namespace zeroshard {

// Exit codes.
inline constexpr int kProbeUsable = 0;
inline constexpr int kProbeUnusable = 1;
inline constexpr int kProbeUsage = 2;

// Acts on the program's `arguments` (without its name) and returns the exit code; nothing where
// they ask for no probe, as those that zeroshardd gives a worker.
//   --probe              prints all devices, one line of JSON each (device/cuda/available.h);
//                        kProbeUsable when at least one can be used
//   --probe cuda:1 ...   says which of these cannot be used; kProbeUsable when all can
//   --help
// What is wrong goes to stderr, as "zeroshard-worker: no CUDA device: ..." with what to do.
std::optional<int> AnswerProbe(std::span<char* const> arguments);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_DEVICE_PROBE_H_
