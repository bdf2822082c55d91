// Conversions between the manifest messages of the APIs and the values of storage/layout.h. Pure.
#ifndef ZEROSHARD_STORAGE_LAYOUT_PROTO_H_
#define ZEROSHARD_STORAGE_LAYOUT_PROTO_H_

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "proto/model.pb.h"
#include "storage/layout.h"

namespace zeroshard {

model::v1::DType DTypeToProto(DType dtype);

// InvalidArgument for DTYPE_UNSPECIFIED and numbers that are no data type.
absl::StatusOr<DType> DTypeFromProto(model::v1::DType dtype);

// The parameters of a manifest, in its order. Checks what a Layout does not know: that every data
// type is known, that the group of every trainable parameter exists, and that a frozen one names an
// existing group or 0. All else is left to Layout::Create. InvalidArgument names the parameter.
absl::StatusOr<std::vector<ParameterSpec>> ParametersFromProto(const model::v1::Manifest& manifest);

// Layout::Create of ParametersFromProto.
absl::StatusOr<Layout> LayoutFromProto(const model::v1::Manifest& manifest, uint32_t workers);

// The inverse; `groups` of the result stays empty.
model::v1::Manifest ParametersToProto(std::span<const ParameterSpec> parameters);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_LAYOUT_PROTO_H_
