#include "storage/layout_proto.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

model::v1::Manifest OneParameter() {
  model::v1::Manifest manifest;
  manifest.add_groups();
  model::v1::Parameter& parameter = *manifest.add_parameters();
  parameter.set_name("head.weight");
  parameter.add_aliases("embedding.weight");
  parameter.add_shape(5);
  parameter.add_shape(7);
  parameter.set_dtype(model::v1::DTYPE_BFLOAT16);
  parameter.set_trainable(true);
  parameter.set_module("head");
  return manifest;
}

TEST(LayoutProtoTest, RoundTrip) {
  const model::v1::Manifest manifest = OneParameter();
  const auto parameters = ParametersFromProto(manifest);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  model::v1::Manifest back = ParametersToProto(*parameters);
  back.add_groups();
  EXPECT_EQ(back.SerializeAsString(), manifest.SerializeAsString());
}

TEST(LayoutProtoTest, EveryDTypeRoundTrips) {
  for (DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    const auto back = DTypeFromProto(DTypeToProto(dtype));
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(*back, dtype);
  }
}

TEST(LayoutProtoTest, UnknownDTypeIsRefusedByName) {
  for (int value : {0, 4, 99, -1}) {
    model::v1::Manifest manifest = OneParameter();
    manifest.mutable_parameters(0)->set_dtype(static_cast<model::v1::DType>(value));
    const auto parameters = ParametersFromProto(manifest);
    EXPECT_EQ(parameters.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(parameters.status().message()), HasSubstr("head.weight"));
  }
}

TEST(LayoutProtoTest, GroupsOfTrainableParametersMustExist) {
  model::v1::Manifest manifest = OneParameter();
  manifest.mutable_parameters(0)->set_group(1);
  EXPECT_THAT(std::string(ParametersFromProto(manifest).status().message()),
              HasSubstr("group 1 does not exist"));
  manifest.mutable_parameters(0)->set_group(0);
  manifest.clear_groups();
  EXPECT_FALSE(ParametersFromProto(manifest).ok());
  manifest.mutable_parameters(0)->set_trainable(false);
  EXPECT_TRUE(ParametersFromProto(manifest).ok());
}

TEST(LayoutProtoTest, LayoutChecksTheShape) {
  model::v1::Manifest manifest = OneParameter();
  ASSERT_TRUE(LayoutFromProto(manifest, 2).ok());
  manifest.mutable_parameters(0)->set_shape(0, kMaxElements);
  EXPECT_FALSE(LayoutFromProto(manifest, 2).ok());
}

}  // namespace
}  // namespace zeroshard
