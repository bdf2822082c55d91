#ifndef ZEROSHARD_TESTS_FAKES_CUDA_ERRORS_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_ERRORS_H_

#include <cuda.h>

#include <optional>
#include <string>

namespace zeroshard::fake_cuda {

// "CUDA_ERROR_OUT_OF_MEMORY" and its words "out of memory"; null for a number that is no error.
const char* ErrorName(CUresult error);
const char* ErrorText(CUresult error);
std::optional<CUresult> ErrorByName(const std::string& name);

// Ends the process: "fake CUDA: <sentence>" on stderr, then SIGABRT.
[[noreturn]] void Die(const std::string& sentence);

// Says the same without ending, for what the driver answers with an error.
void Complain(const std::string& sentence);

std::string Hex(uint64_t address);

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_ERRORS_H_
