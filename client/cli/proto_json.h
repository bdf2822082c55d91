// ToJson: a protobuf message as JSON for machines: field names as in the .proto file, every field
// present, numbers as numbers (also 64-bit ones), enum values by name, bytes as hexadecimal digits.
// Pure.

#ifndef ZEROSHARD_CLIENT_CLI_PROTO_JSON_H_
#define ZEROSHARD_CLIENT_CLI_PROTO_JSON_H_

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>

namespace zeroshard {

nlohmann::ordered_json ToJson(const google::protobuf::Message& message);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_CLI_PROTO_JSON_H_
