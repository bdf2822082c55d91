// One optimizer step over torch tensors, as zeroshard.optim takes it: walks the parameter groups,
// notes where the tensors lie, and updates all of them in one native pass.
//
// PyTorch is not linked: a tensor is what its Python attributes say, so any version will do.
// Reading them is most of the cost of small tensors; therefore a record is kept for every
// parameter, and a step looks only at what may have changed since (identity, address, type and
// size).
#ifndef ZEROSHARD_CLIENT_PYTHON_OPTIMIZER_STEP_H_
#define ZEROSHARD_CLIENT_PYTHON_OPTIMIZER_STEP_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/python/tensor_updates.h"
#include "client/python/torch_tensor.h"
#include "device/cpu/thread_pool.h"
#include "storage/state_format.h"
#include "worker/optim/kernels.h"

namespace zeroshard::native {

// What one key of a parameter's state holds.
enum class StateRole : uint8_t {
  kStep,    // number of updates, a scalar float32 or float64
  kMaster,  // the fp32 master
  kLow,     // the low half of a split master, 16 bits an element
  kState,   // an optimizer state in the group's format
  kAbsmax,  // the scales of an 8-bit state, fp32, one a block of 256 elements
};

struct StateKey {
  std::string name;
  StateRole role = StateRole::kStep;
  int slot = 0;
};

// How a group is updated; constant while its records are valid.
struct GroupForm {
  OptimizerKind kind = OptimizerKind::kAdamW;
  MasterForm master = MasterForm::kSplit;  // of bf16 parameters
  StateFormat states = StateFormat::kFloat32;

  friend bool operator==(const GroupForm&, const GroupForm&) = default;
};

// The state that a parameter of type `dtype` needs. InvalidArgument for 8-bit states of an
// optimizer that has none.
absl::StatusOr<std::vector<StateKey>> StateKeysOf(const GroupForm& form, DType dtype);

class OptimizerStep {
 public:
  struct Group {
    GroupForm form;
    Hyperparameters hyperparameters;
    bool bias_correction = true;
    uint64_t rounding_seed = 0;
    pybind11::list parameters;
  };

  // Updates every parameter that has a gradient and returns the list of them. `state` is the
  // optimizer's dictionary; prepare(group, parameter, gradient) is called where the state is
  // missing or anything has changed: it checks the three, completes the state, and returns the
  // gradient laid out as the parameter is. Nothing is updated when it, or a check of the
  // hyperparameters, fails. Called with the GIL, which is released during the update. One call at a
  // time.
  pybind11::list Step(ThreadPool& pool, const std::vector<Group>& groups,
                      const pybind11::dict& state, const pybind11::function& prepare);

 private:
  struct KeyList {
    std::vector<StateKey> keys;
    std::vector<pybind11::str> names;
  };
  struct Entry {
    pybind11::object tensor;
    uint64_t address = 0;
  };
  // What was found out about one parameter.
  struct Record {
    pybind11::object parameter;
    TensorFacts facts;
    const KeyList* keys = nullptr;
    std::vector<Entry> entries;  // in the order of the keys
    void* step = nullptr;        // null: its updates are not counted
    bool step_is_double = false;
    TensorUpdate update;
  };
  struct GroupRecords {
    std::optional<GroupForm> form;
    KeyList keys[3];  // by DType
    std::vector<Record> records;
  };
  struct Place {
    const Group& group;
    size_t index = 0;
    uint32_t first = 0;  // number of the group's first parameter
  };
  // A step in the making.
  struct Work {
    std::vector<const Record*> records;
    std::vector<const TensorUpdate*> updates;
    std::vector<UpdateArgs> args;
    pybind11::list parameters;
    std::vector<pybind11::object> gradients;  // their memory is used
  };
  // The arguments of the parameters of one group, by their number of updates.
  class ArgsTable;

  void Reset(const std::vector<Group>& groups);
  void AddGroup(const Place& place, const pybind11::dict& state, const pybind11::function& prepare,
                Work& work);
  // Makes the record hold for this step; returns the number of updates the parameter has had (1 for
  // any but 0 where they are not counted).
  int64_t Refresh(const Place& place, const pybind11::handle& parameter,
                  const pybind11::dict& state, const pybind11::function& prepare,
                  pybind11::object& gradient, Record& record);
  bool Fresh(const Record& record, const TensorFacts& facts, const pybind11::handle& parameter,
             const pybind11::object& values) const;
  static bool HasStates(const GroupForm& form, const pybind11::object& values);
  void Describe(const Place& place, const pybind11::handle& parameter,
                const pybind11::object& values, Record& record) const;
  void Note(const StateKey& key, const Entry& entry, Record& record) const;

  TensorReader reader_;
  std::deque<GroupRecords> groups_;  // records point into it
  bool running_ = false;
};

}  // namespace zeroshard::native

#endif  // ZEROSHARD_CLIENT_PYTHON_OPTIMIZER_STEP_H_
