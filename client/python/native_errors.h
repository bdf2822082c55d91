// How an absl::Status becomes zeroshard.ZeroShardError. The only C++ exceptions of this code base
// are here: pybind11 has no other way out of a function.
#ifndef ZEROSHARD_CLIENT_PYTHON_NATIVE_ERRORS_H_
#define ZEROSHARD_CLIENT_PYTHON_NATIVE_ERRORS_H_

#include <pybind11/pybind11.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard::native {

struct StatusException {
  absl::Status status;
};

// Both may be called with or without the GIL.
inline void Check(absl::Status status) {
  if (!status.ok()) throw StatusException{std::move(status)};
}

template <typename T>
T Value(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

// Makes StatusException arrive in Python as zeroshard.errors.ZeroShardError with the code's name.
// An interrupted wait arrives as the exception that the signal handler has raised.
void RegisterErrors();

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_NATIVE_ERRORS_H_
