// The part of zeroshard._native that zeroshard.optim uses: optimizer updates in this process.
#ifndef ZEROSHARD_CLIENT_PYTHON_NATIVE_OPTIM_H_
#define ZEROSHARD_CLIENT_PYTHON_NATIVE_OPTIM_H_

#include <pybind11/pybind11.h>

namespace zeroshard::native {

// Defines in `module`:
//   KernelPool(threads)                 .threads
//   optimizer_state_keys(form, dtype)   -> list of (key, role)
//   check_hyperparameters(group)        refuses what an update would
//   OptimizerStep()                     .step(pool, groups, state, prepare) -> list of parameters
// form: {"kind", "master", "states"}; a group has these and "hyper" (the numbers by name) and
// "params" (a list). Errors are zeroshard.errors.ZeroShardError.
void DefineOptim(pybind11::module_& module);

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_NATIVE_OPTIM_H_
