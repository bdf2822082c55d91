#include "client/python/native_optim.h"

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/python/native_errors.h"
#include "client/python/optimizer_step.h"
#include "device/cpu/thread_pool.h"
#include "worker/optim/registry.h"

namespace zeroshard::native {
namespace {

namespace py = pybind11;
using py::operator""_a;
using Pool = std::unique_ptr<ThreadPool>;

struct KernelPool {
  Pool pool;
};

template <typename T>
T ParseWord(const py::handle& source, const char* key,
            std::initializer_list<std::pair<std::string_view, T>> words) {
  const std::string word = py::cast<std::string>(source[key]);
  for (const auto& [name, value] : words) {
    if (name == word) return value;
  }
  throw StatusException{
      absl::InvalidArgumentError(absl::StrCat(key, " \"", word, "\" is unknown"))};
}

GroupForm FormOf(const py::handle& source) {
  return {.kind = Value(ParseOptimizerKind(py::cast<std::string>(source["kind"]))),
          .master = ParseWord<MasterForm>(source, "master",
                                          {{"split", MasterForm::kSplit},
                                           {"fp32", MasterForm::kFloat32},
                                           {"none", MasterForm::kNone}}),
          .states = ParseWord<StateFormat>(source, "states",
                                           {{"fp32", StateFormat::kFloat32},
                                            {"bf16", StateFormat::kBfloat16},
                                            {"int8", StateFormat::kInt8}})};
}

OptimizerStep::Group GroupOf(const py::handle& source) {
  OptimizerStep::Group group;
  group.form = FormOf(source);
  const py::dict hyper = source["hyper"];
  auto read = [&](const char* key, double& target) {
    if (hyper.contains(key)) target = py::cast<double>(hyper[key]);
  };
  Hyperparameters& h = group.hyperparameters;
  read("lr", h.lr);
  read("beta1", h.beta1);
  read("beta2", h.beta2);
  read("eps", h.eps);
  read("weight_decay", h.weight_decay);
  read("momentum", h.momentum);
  read("dampening", h.dampening);
  if (hyper.contains("nesterov")) h.nesterov = py::cast<bool>(hyper["nesterov"]);
  if (hyper.contains("bias_correction")) {
    group.bias_correction = py::cast<bool>(hyper["bias_correction"]);
  }
  if (hyper.contains("rounding_seed")) {
    group.rounding_seed = py::cast<uint64_t>(hyper["rounding_seed"]);
  }
  group.parameters = source["params"];
  return group;
}

const char* RoleName(StateRole role) {
  switch (role) {
    case StateRole::kStep:
      return "step";
    case StateRole::kMaster:
      return "master";
    case StateRole::kLow:
      return "low";
    case StateRole::kState:
      return "state";
    case StateRole::kAbsmax:
      return "absmax";
  }
  return "";
}

py::list StateKeys(const py::dict& form, const std::string& dtype) {
  py::list keys;
  for (const StateKey& key : Value(StateKeysOf(FormOf(form), Value(ParseDType(dtype))))) {
    keys.append(py::make_tuple(key.name, RoleName(key.role)));
  }
  return keys;
}

void CheckHyperparameters(const py::dict& source) {
  const OptimizerStep::Group group = GroupOf(source);
  Check(ValidateHyperparameters(group.form.kind, group.hyperparameters));
  Check(StateKeysOf(group.form, DType::kFloat32).status());
}

py::list Step(OptimizerStep& self, KernelPool& pool, const py::list& groups, const py::dict& state,
              const py::function& prepare) {
  std::vector<OptimizerStep::Group> parsed;
  for (const py::handle& group : groups) parsed.push_back(GroupOf(group));
  return self.Step(*pool.pool, parsed, state, prepare);
}

}  // namespace

void DefineOptim(py::module_& module) {
  py::class_<KernelPool>(module, "KernelPool")
      .def(py::init([](int threads) {
             return KernelPool{Value(ThreadPool::Create({.threads = threads}))};
           }),
           "threads"_a)
      .def_property_readonly("threads", [](const KernelPool& self) { return self.pool->lanes(); });
  py::class_<OptimizerStep>(module, "OptimizerStep")
      .def(py::init<>())
      .def("step", &Step, "pool"_a, "groups"_a, "state"_a, "prepare"_a);
  module.def("optimizer_state_keys", &StateKeys, "form"_a, "dtype"_a);
  module.def("check_hyperparameters", &CheckHyperparameters, "group"_a);
}

}  // namespace zeroshard::native
