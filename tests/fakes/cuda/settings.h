#ifndef ZEROSHARD_TESTS_FAKES_CUDA_SETTINGS_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_SETTINGS_H_

#include <cuda.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zeroshard::fake_cuda {

// The k-th call of `api` answers with `error`.
struct Fault {
  std::string api;
  uint64_t at = 0;
  CUresult error = CUDA_SUCCESS;
};

// What ZEROSHARD_FAKE_CUDA says; its grammar is in docs/testing.md, "The fake GPU".
struct Settings {
  int devices = 1;
  uint64_t memory = uint64_t{8} << 30;  // of each device
  int driver = CUDA_VERSION;
  int major = 9;
  int minor = 0;
  std::string name = "Fake GPU";
  bool mig = false;
  bool poison = false;             // fresh device memory is 0xcd, not zero
  std::string node;                // directory that processes share, or empty: a GPU of one process
  std::optional<uint64_t> jitter;  // seed of random delays before operations
  std::vector<Fault> faults;
  uint64_t lost_at = 0;  // from this operation of the process on, 0: never
  CUresult lost_error = CUDA_ERROR_ECC_UNCORRECTABLE;
  uint64_t hang_at = 0;  // this operation never ends, 0: none
  std::string only;      // faults hit processes with this in their command line
  bool once = false;     // a fault of the node hits one process, once
};

// Ends the process with a sentence about a text that is not as documented.
Settings ParseSettings(const std::string& text);

// Of the environment; the defaults without one.
Settings SettingsFromEnvironment();

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_SETTINGS_H_
