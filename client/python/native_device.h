// The part of a native session that jobs on GPUs have.
#ifndef ZEROSHARD_CLIENT_PYTHON_NATIVE_DEVICE_H_
#define ZEROSHARD_CLIENT_PYTHON_NATIVE_DEVICE_H_

#include <pybind11/pybind11.h>

#include <memory>

#include "client/python/native_session.h"

namespace zeroshard::native {

// Methods and properties of the class, and functions of the module.
void DefineDevice(pybind11::module_& module,
                  pybind11::class_<NativeSession, SharedSession>& session);

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_NATIVE_DEVICE_H_
