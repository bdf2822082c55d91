// Between Python's dictionaries and the SDK's structs. All functions need the GIL; a wrong key or
// type is a StatusException with InvalidArgument that names it.
#ifndef ZEROSHARD_CLIENT_PYTHON_NATIVE_CONVERT_H_
#define ZEROSHARD_CLIENT_PYTHON_NATIVE_CONVERT_H_

#include <pybind11/pybind11.h>

#include <vector>

#include "client/session.h"

namespace google::protobuf {
class Message;
}

namespace zeroshard::native {

// {name, aliases, shape, dtype, trainable, group, module}; all but name and shape may be left out.
std::vector<ParameterSpec> ToParameters(const pybind11::list& parameters);

// {lr, weight_decay, beta1, beta2, eps, momentum, dampening, nesterov, bias_correction}; what is
// left out has the default of GroupHyperparameters.
std::vector<GroupHyperparameters> ToGroups(const pybind11::list& groups);

// Every field by its name: numbers, booleans, text, nested dictionaries and lists. An enum value is
// its name in lower case without the first word: DTYPE_BFLOAT16 is "bfloat16".
pybind11::dict ToDict(const google::protobuf::Message& message);

// One dictionary a unit, as zeroshard/units.py reads them.
pybind11::list UnitsToList(const Session& session);

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_NATIVE_CONVERT_H_
