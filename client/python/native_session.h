// NativeSession: a Session as Python holds it.
#ifndef ZEROSHARD_CLIENT_PYTHON_NATIVE_SESSION_H_
#define ZEROSHARD_CLIENT_PYTHON_NATIVE_SESSION_H_

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "client/session.h"
#include "client/write_guard.h"

namespace zeroshard::native {

struct NativeSession {
  explicit NativeSession(std::unique_ptr<Session> attached)
      : session(std::move(attached)), guard(std::make_unique<WriteGuardEntry>(*session)) {}

  // Python drops the last reference with the GIL held, and the end of a session may take a moment.
  ~NativeSession() {
    guard.reset();
    if (_Py_IsFinalizing() == 0 && PyGILState_Check() != 0) {
      pybind11::gil_scoped_release release;
      session.reset();
    }
  }

  std::unique_ptr<Session> session;
  std::unique_ptr<WriteGuardEntry> guard;
};
using SharedSession = std::shared_ptr<NativeSession>;

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_NATIVE_SESSION_H_
