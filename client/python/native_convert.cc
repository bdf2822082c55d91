#include "client/python/native_convert.h"

#include <google/protobuf/message.h>
#include <pybind11/stl.h>

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/python/native_errors.h"
#include "proto/model.pb.h"

namespace zeroshard::native {
namespace {

namespace py = pybind11;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Takes named values out of a dictionary.
class Fields {
 public:
  // `what` names the dictionary in errors.
  Fields(const py::handle& source, std::string what) : what_(std::move(what)) {
    if (!py::isinstance<py::dict>(source)) Fail("is not a dict");
    values_ = py::reinterpret_borrow<py::dict>(source);
  }

  template <typename T>
  void Read(const char* key, T& target) {
    ++known_;
    if (!values_.contains(key)) {
      --known_;
      return;
    }
    try {
      target = py::cast<T>(values_[key]);
    } catch (const py::cast_error&) {
      Fail(absl::StrCat("has a wrong value for '", key, "': ", Repr(values_[key])));
    }
  }

  // Refuses keys that nobody has read.
  void Finish() const {
    if (py::len(values_) != known_) Fail(absl::StrCat("has an unknown key: ", Repr(values_)));
  }

  [[noreturn]] void Fail(const std::string& problem) const {
    throw StatusException{absl::InvalidArgumentError(absl::StrCat(what_, " ", problem))};
  }

 private:
  static std::string Repr(const py::handle& value) {
    return py::cast<std::string>(py::repr(value));
  }

  std::string what_;
  py::dict values_;
  size_t known_ = 0;
};

std::string EnumText(const google::protobuf::EnumValueDescriptor* value) {
  const std::string name = absl::AsciiStrToLower(value->name());
  const size_t underscore = name.find('_');
  return underscore == std::string::npos ? name : name.substr(underscore + 1);
}

py::object FieldValue(const Message& message, const FieldDescriptor* field) {
  const Reflection* reflection = message.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return py::int_(reflection->GetInt32(message, field));
    case FieldDescriptor::CPPTYPE_INT64:
      return py::int_(reflection->GetInt64(message, field));
    case FieldDescriptor::CPPTYPE_UINT32:
      return py::int_(reflection->GetUInt32(message, field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return py::int_(reflection->GetUInt64(message, field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return py::float_(reflection->GetDouble(message, field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return py::float_(reflection->GetFloat(message, field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return py::bool_(reflection->GetBool(message, field));
    case FieldDescriptor::CPPTYPE_ENUM:
      return py::str(EnumText(reflection->GetEnum(message, field)));
    case FieldDescriptor::CPPTYPE_STRING:
      return py::str(reflection->GetString(message, field));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToDict(reflection->GetMessage(message, field));
  }
  return py::none();
}

}  // namespace

std::vector<ParameterSpec> ToParameters(const py::list& parameters) {
  std::vector<ParameterSpec> specs;
  specs.reserve(parameters.size());
  for (const py::handle& parameter : parameters) {
    Fields fields(parameter, absl::StrCat("parameter ", specs.size()));
    ParameterSpec spec;
    std::string dtype(DTypeName(spec.dtype));
    fields.Read("name", spec.name);
    fields.Read("aliases", spec.aliases);
    fields.Read("shape", spec.shape);
    fields.Read("dtype", dtype);
    fields.Read("trainable", spec.trainable);
    fields.Read("group", spec.group);
    fields.Read("module", spec.module);
    fields.Finish();
    absl::StatusOr<DType> parsed = ParseDType(dtype);
    if (!parsed.ok()) Check(Annotate(parsed.status(), absl::StrCat("parameter ", spec.name)));
    spec.dtype = *parsed;
    specs.push_back(std::move(spec));
  }
  return specs;
}

std::vector<GroupHyperparameters> ToGroups(const py::list& groups) {
  std::vector<GroupHyperparameters> result;
  for (const py::handle& group : groups) {
    Fields fields(group, absl::StrCat("parameter group ", result.size()));
    GroupHyperparameters& target = result.emplace_back();
    fields.Read("lr", target.lr);
    fields.Read("weight_decay", target.weight_decay);
    fields.Read("beta1", target.beta1);
    fields.Read("beta2", target.beta2);
    fields.Read("eps", target.eps);
    fields.Read("momentum", target.momentum);
    fields.Read("dampening", target.dampening);
    fields.Read("nesterov", target.nesterov);
    fields.Read("bias_correction", target.bias_correction);
    fields.Finish();
  }
  return result;
}

py::dict ToDict(const Message& message) {
  py::dict result;
  const auto* descriptor = message.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    // The messages that come here have no repeated fields.
    if (!field->is_repeated()) result[field->name().c_str()] = FieldValue(message, field);
  }
  return result;
}

py::list UnitsToList(const Session& session) {
  py::list result;
  const Layout& layout = session.layout();
  const model::v1::EngineConfig& config = session.config();
  for (uint32_t i = 0; i < layout.units().size(); ++i) {
    const Unit& unit = layout.units()[i];
    const bool persistent =
        config.stage() < 3 || layout.persistent(i, config.persistence_threshold());
    using py::operator""_a;
    result.append(py::dict("dtype"_a = std::string(DTypeName(unit.dtype)),
                           "trainable"_a = unit.trainable, "parameters"_a = unit.parameters,
                           "elements"_a = unit.elements(), "data_elements"_a = unit.data_elements,
                           "window_offset"_a = unit.window_offset, "bytes"_a = unit.bytes(),
                           "persistent"_a = persistent));
  }
  return result;
}

}  // namespace zeroshard::native
