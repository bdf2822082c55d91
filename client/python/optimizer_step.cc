#include "client/python/optimizer_step.h"

#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/python/native_errors.h"
#include "worker/optim/random_key.h"
#include "worker/optim/registry.h"

namespace zeroshard::native {
namespace {

namespace py = pybind11;

// As in the workers' decision of a step: a number of updates at which every bias correction is 1.
constexpr int64_t kNoBiasCorrection = int64_t{1} << 40;
// Numbers of updates up to here are exact in either type of "step".
constexpr double kMostUpdates = 0x1p52;

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

bool Stochastic(const GroupForm& form, DType dtype) {
  return dtype == DType::kBfloat16 && form.master == MasterForm::kNone;
}

bool CountsUpdates(const GroupForm& form, DType dtype) {
  switch (form.kind) {
    case OptimizerKind::kAdamW:
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdagrad:
      return true;
    case OptimizerKind::kSgd:
    case OptimizerKind::kSgdMomentum:
    case OptimizerKind::kLion:
      return Stochastic(form, dtype);
  }
  return true;
}

MasterKind MasterKindOf(const GroupForm& form, DType dtype) {
  if (dtype != DType::kBfloat16) return MasterKind::kFloat32;
  switch (form.master) {
    case MasterForm::kFloat32:
      return MasterKind::kFloat32;
    case MasterForm::kSplit:
      return MasterKind::kSplit;
    case MasterForm::kNone:
      return MasterKind::kStochastic;
  }
  return MasterKind::kSplit;
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// dict.get(key); a null object where there is none.
py::object Item(const py::handle& dict, const py::handle& key) {
  PyObject* value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(value);
}

double StepOf(const void* step, bool is_double) {
  return is_double ? *static_cast<const double*>(step) : *static_cast<const float*>(step);
}

}  // namespace

absl::StatusOr<std::vector<StateKey>> StateKeysOf(const GroupForm& form, DType dtype) {
  const OptimizerInfo& info = GetOptimizerInfo(form.kind);
  if (form.states == StateFormat::kInt8 && !info.eight_bit) {
    return Invalid(absl::StrCat("no 8-bit states are published for ", std::string(info.name)));
  }
  std::vector<StateKey> keys;
  if (CountsUpdates(form, dtype)) keys.push_back({"step", StateRole::kStep});
  for (int slot = 0; slot < info.state_slots; ++slot) {
    const std::string name(info.slots[slot].name);
    keys.push_back({name, StateRole::kState, slot});
    if (form.states != StateFormat::kInt8) continue;
    keys.push_back({absl::StrCat(name, "_absmax"), StateRole::kAbsmax, slot});
  }
  switch (MasterKindOf(form, dtype)) {
    case MasterKind::kFloat32:
    case MasterKind::kFloat32Canonical:
      if (dtype != DType::kFloat32) keys.push_back({"master", StateRole::kMaster});
      break;
    case MasterKind::kSplit:
      keys.push_back({"master_low", StateRole::kLow});
      break;
    case MasterKind::kStochastic:
      break;
  }
  return keys;
}

class OptimizerStep::ArgsTable {
 public:
  ArgsTable(const Group& group, std::vector<UpdateArgs>& args) : group_(group), args_(args) {}

  // Of the `count`-th update of a parameter.
  uint32_t IndexOf(int64_t count) {
    if (count == last_count_) return last_index_;
    const auto [place, added] = indices_.try_emplace(count, static_cast<uint32_t>(args_.size()));
    if (added) {
      UpdateArgs made = MakeUpdateArgs(group_.hyperparameters,
                                       group_.bias_correction ? count : kNoBiasCorrection);
      made.first_step = count == 1 ? 1 : 0;
      args_.push_back(made);
    }
    last_count_ = count;
    return last_index_ = place->second;
  }

 private:
  const Group& group_;
  std::vector<UpdateArgs>& args_;
  std::unordered_map<int64_t, uint32_t> indices_;
  int64_t last_count_ = 0;  // updates are counted from 1
  uint32_t last_index_ = 0;
};

void OptimizerStep::Reset(const std::vector<Group>& groups) {
  groups_.resize(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    GroupRecords& group = groups_[i];
    if (group.form != groups[i].form) {
      group = GroupRecords{};
      group.form = groups[i].form;
      for (DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
        KeyList& list = group.keys[static_cast<int>(dtype)];
        list.keys = Value(StateKeysOf(groups[i].form, dtype));
        for (const StateKey& key : list.keys) list.names.push_back(Interned(key.name.c_str()));
      }
    }
    group.records.resize(py::len(groups[i].parameters));
  }
}

py::list OptimizerStep::Step(ThreadPool& pool, const std::vector<Group>& groups,
                             const py::dict& state, const py::function& prepare) {
  if (running_) {
    throw StatusException{absl::FailedPreconditionError(
        "step() of an optimizer was called while another call of it is running")};
  }
  const struct Running {
    explicit Running(bool& flag) : flag(flag) { flag = true; }
    ~Running() { flag = false; }
    bool& flag;
  } running(running_);
  for (size_t i = 0; i < groups.size(); ++i) {
    Check(Annotate(ValidateHyperparameters(groups[i].form.kind, groups[i].hyperparameters),
                   absl::StrCat("parameter group ", i)));
  }
  Reset(groups);
  Work work;
  uint32_t first = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    AddGroup({groups[i], i, first}, state, prepare, work);
    first += static_cast<uint32_t>(groups_[i].records.size());
  }
  for (const Record* record : work.records) {
    if (record->step == nullptr) continue;
    if (record->step_is_double) {
      *static_cast<double*>(record->step) += 1;
    } else {
      *static_cast<float*>(record->step) += 1;
    }
  }
  {
    const py::gil_scoped_release release;
    ApplyTensorUpdates(work.updates, work.args, pool);
  }
  return work.parameters;
}

void OptimizerStep::AddGroup(const Place& place, const py::dict& state, const py::function& prepare,
                             Work& work) {
  GroupRecords& group = groups_[place.index];
  ArgsTable args(place.group, work.args);
  for (size_t i = 0; i < group.records.size(); ++i) {
    const py::handle parameter = PyList_GET_ITEM(place.group.parameters.ptr(), i);
    py::object gradient = reader_.Gradient(parameter);
    if (!gradient) continue;
    Record& record = group.records[i];
    const int64_t updates = Refresh(place, parameter, state, prepare, gradient, record);
    record.update.args = args.IndexOf(updates + 1);
    record.update.random_key =
        RandomKey(place.group.rounding_seed, updates, place.first + static_cast<uint32_t>(i));
    work.records.push_back(&record);
    work.updates.push_back(&record.update);
    work.parameters.append(parameter);
    work.gradients.push_back(std::move(gradient));
  }
}

int64_t OptimizerStep::Refresh(const Place& place, const py::handle& parameter,
                               const py::dict& state, const py::function& prepare,
                               py::object& gradient, Record& record) {
  py::object values = Item(state, parameter);
  const std::optional<TensorFacts> facts = reader_.Facts(parameter);
  std::optional<TensorFacts> gradient_facts = reader_.Facts(gradient);
  const bool fresh =
      facts.has_value() && gradient_facts.has_value() && Fresh(record, *facts, parameter, values) &&
      facts->contiguous && gradient_facts->contiguous &&
      gradient_facts->elements == facts->elements &&
      (gradient_facts->dtype == facts->dtype || gradient_facts->dtype == DType::kFloat32);
  bool first = false;
  if (!fresh) {
    record = Record{};
    first = !HasStates(place.group.form, values);
    gradient = prepare(place.index, parameter, gradient);
    gradient_facts = reader_.Facts(gradient);
    Describe(place, parameter, Item(state, parameter), record);
    if (!gradient_facts.has_value() || gradient_facts->elements != record.facts.elements) {
      throw StatusException{Invalid("the gradient does not fit its parameter")};
    }
  }
  record.update.arrays.grad = Pointer(gradient_facts->address);
  record.update.arrays.grad_dtype = gradient_facts->dtype;
  if (record.step == nullptr) return first ? 0 : 1;
  const double step = StepOf(record.step, record.step_is_double);
  if (!(step >= 0 && step < kMostUpdates)) {
    throw StatusException{Invalid(absl::StrCat("the state's step is ", step))};
  }
  return static_cast<int64_t>(step);
}

bool OptimizerStep::Fresh(const Record& record, const TensorFacts& facts,
                          const py::handle& parameter, const py::object& values) const {
  if (!record.parameter.is(parameter) || record.facts != facts) return false;
  const KeyList& list = *record.keys;
  if (list.keys.empty()) return true;
  if (!values) return false;
  for (size_t i = 0; i < list.names.size(); ++i) {
    const Entry& entry = record.entries[i];
    PyObject* tensor = PyDict_GetItemWithError(values.ptr(), list.names[i].ptr());
    if (tensor != entry.tensor.ptr() || reader_.Address(tensor) != entry.address) return false;
  }
  return true;
}

bool OptimizerStep::HasStates(const GroupForm& form, const py::object& values) {
  if (!values) return false;
  const OptimizerInfo& info = GetOptimizerInfo(form.kind);
  if (info.state_slots == 0) return true;
  const py::object first = Item(values, py::str(std::string(info.slots[0].name)));
  return first && !first.is_none();
}

void OptimizerStep::Describe(const Place& place, const py::handle& parameter,
                             const py::object& values, Record& record) const {
  const std::optional<TensorFacts> facts = reader_.Facts(parameter);
  if (!facts.has_value()) throw StatusException{Invalid("not a parameter that can be updated")};
  const GroupForm& form = place.group.form;
  record.parameter = py::reinterpret_borrow<py::object>(parameter);
  record.facts = *facts;
  record.keys = &groups_[place.index].keys[static_cast<int>(facts->dtype)];
  UpdateArrays& arrays = record.update.arrays;
  record.update.kind = form.kind;
  record.update.elements = facts->elements;
  arrays.state_format = form.states;
  arrays.master = MasterKindOf(form, facts->dtype);
  if (facts->dtype == DType::kFloat32) {
    arrays.param = static_cast<float*>(Pointer(facts->address));
  } else if (arrays.master == MasterKind::kFloat32) {
    arrays.out = Pointer(facts->address);
    arrays.out_dtype = facts->dtype;
  } else {
    arrays.high = static_cast<uint16_t*>(Pointer(facts->address));
  }
  for (size_t i = 0; i < record.keys->keys.size(); ++i) {
    const py::object tensor = values ? Item(values, record.keys->names[i]) : py::object();
    if (!tensor) throw StatusException{Invalid("a state is missing: " + record.keys->keys[i].name)};
    record.entries.push_back({tensor, reader_.Address(tensor)});
    Note(record.keys->keys[i], record.entries.back(), record);
  }
}

void OptimizerStep::Note(const StateKey& key, const Entry& entry, Record& record) const {
  UpdateArrays& arrays = record.update.arrays;
  void* memory = Pointer(entry.address);
  switch (key.role) {
    case StateRole::kStep:
      record.step = memory;
      record.step_is_double = reader_.IsDouble(entry.tensor);
      break;
    case StateRole::kMaster:
      arrays.param = static_cast<float*>(memory);
      break;
    case StateRole::kLow:
      arrays.low = static_cast<uint16_t*>(memory);
      break;
    case StateRole::kState:
      arrays.state[key.slot] = memory;
      break;
    case StateRole::kAbsmax:
      arrays.absmax[key.slot] = static_cast<float*>(memory);
      break;
  }
}

}  // namespace zeroshard::native
