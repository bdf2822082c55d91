#include "storage/layout_proto.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace zeroshard {
namespace {

absl::StatusOr<ParameterSpec> ParameterFromProto(const model::v1::Parameter& parameter,
                                                 uint32_t groups) {
  ParameterSpec spec;
  ZS_ASSIGN_OR_RETURN(spec.dtype, DTypeFromProto(parameter.dtype()));
  const bool no_group_needed = !parameter.trainable() && parameter.group() == 0;
  if (parameter.group() >= groups && !no_group_needed) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group ", parameter.group(), " does not exist, the manifest has ", groups, " groups"));
  }
  spec.name = parameter.name();
  spec.aliases.assign(parameter.aliases().begin(), parameter.aliases().end());
  spec.shape.assign(parameter.shape().begin(), parameter.shape().end());
  spec.trainable = parameter.trainable();
  spec.group = parameter.group();
  spec.module = parameter.module();
  return spec;
}

}  // namespace

model::v1::DType DTypeToProto(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return model::v1::DTYPE_FLOAT32;
    case DType::kBfloat16:
      return model::v1::DTYPE_BFLOAT16;
    case DType::kFloat16:
      return model::v1::DTYPE_FLOAT16;
  }
  ZS_CHECK(false, "not a DType");
}

absl::StatusOr<DType> DTypeFromProto(model::v1::DType dtype) {
  switch (dtype) {
    case model::v1::DTYPE_FLOAT32:
      return DType::kFloat32;
    case model::v1::DTYPE_BFLOAT16:
      return DType::kBfloat16;
    case model::v1::DTYPE_FLOAT16:
      return DType::kFloat16;
    default:
      return absl::InvalidArgumentError(absl::StrCat("data type ", static_cast<int>(dtype),
                                                     " is not one of float32, bfloat16, float16"));
  }
}

absl::StatusOr<std::vector<ParameterSpec>> ParametersFromProto(
    const model::v1::Manifest& manifest) {
  std::vector<ParameterSpec> parameters;
  parameters.reserve(static_cast<size_t>(manifest.parameters_size()));
  const auto groups = static_cast<uint32_t>(manifest.groups_size());
  for (const model::v1::Parameter& parameter : manifest.parameters()) {
    absl::StatusOr<ParameterSpec> spec = ParameterFromProto(parameter, groups);
    if (!spec.ok()) {
      return Annotate(spec.status(),
                      absl::StrCat("parameter ", parameters.size(), " \"", parameter.name(), "\""));
    }
    parameters.push_back(*std::move(spec));
  }
  return parameters;
}

absl::StatusOr<Layout> LayoutFromProto(const model::v1::Manifest& manifest, uint32_t workers) {
  ZS_ASSIGN_OR_RETURN(std::vector<ParameterSpec> parameters, ParametersFromProto(manifest));
  return Layout::Create(std::move(parameters), workers);
}

model::v1::Manifest ParametersToProto(std::span<const ParameterSpec> parameters) {
  model::v1::Manifest manifest;
  for (const ParameterSpec& spec : parameters) {
    model::v1::Parameter& parameter = *manifest.add_parameters();
    parameter.set_name(spec.name);
    for (const std::string& alias : spec.aliases) parameter.add_aliases(alias);
    for (uint64_t dimension : spec.shape) parameter.add_shape(dimension);
    parameter.set_dtype(DTypeToProto(spec.dtype));
    parameter.set_trainable(spec.trainable);
    parameter.set_group(spec.group);
    parameter.set_module(spec.module);
  }
  return manifest;
}

}  // namespace zeroshard
