#include <algorithm>
#include <utility>

#include "server/ds_config_settings.h"
#include "server/hjson.h"
#include "server/text.h"

// Steps 1 and 2: aliases, deprecated forms, and the client's values, all as edits of the tree, so
// that the steps behind see one spelling of every key.

namespace zeroshard {
namespace {

using Kind = JsonValue::Kind;

JsonValue MakeObject(SourcePosition at) {
  JsonValue value;
  value.kind = Kind::kObject;
  value.at = at;
  return value;
}

void Erase(JsonValue& object, std::string_view name) {
  std::erase_if(object.members, [&](const JsonMember& member) { return member.name == name; });
}

JsonMember* FindMember(JsonValue& object, std::string_view name) {
  for (JsonMember& member : object.members) {
    if (member.name == name) return &member;
  }
  return nullptr;
}

// The block at a dotted path, or null when it or one above it is not there.
JsonValue* FindBlock(JsonValue& root, std::string_view path) {
  JsonValue* block = &root;
  while (!path.empty() && block != nullptr) {
    const std::string_view name = path.substr(0, path.find('.'));
    path.remove_prefix(std::min(path.size(), name.size() + 1));
    block = block->Find(name);
  }
  return block != nullptr && block->is_object() ? block : nullptr;
}

// "zero_optimization": true is stage 1, with allgather_size from the top level.
void RewriteBooleanZero(JsonValue& root, Marks& marks, Findings& findings) {
  JsonMember* zero = FindMember(root, "zero_optimization");
  if (zero == nullptr || zero->value.kind != Kind::kBool) return;
  const bool on = zero->value.boolean;
  const SourcePosition at = zero->value.at;
  JsonValue stage;
  stage.kind = Kind::kNumber;
  stage.text = on ? "1" : "0";
  stage.at = at;
  zero->value = MakeObject(at);
  zero->value.members.push_back({.name = "stage", .at = at, .value = std::move(stage)});
  marks["zero_optimization.stage"] = {
      ValueOrigin::kAlias, Concat("written as zero_optimization: ", on ? "true" : "false")};
  findings.Warn(at, Concat("zero_optimization: ", on ? "true" : "false",
                           " is deprecated: write a block with stage ", on ? "1." : "0."));
  if (JsonMember* size = FindMember(root, "allgather_size"); size != nullptr) {
    zero->value.members.push_back(
        {.name = "allgather_bucket_size", .at = size->at, .value = size->value});
    marks["zero_optimization.allgather_bucket_size"] = {ValueOrigin::kAlias,
                                                        "written as allgather_size"};
    Erase(root, "allgather_size");
  }
}

// A key under another name in the same block.
void Rename(const KeySpec& alias, JsonValue& block, Marks& marks, Findings& findings) {
  JsonMember* member = FindMember(block, LeafName(alias.path));
  if (member == nullptr) return;
  const std::string_view target_name = LeafName(alias.target);
  if (const JsonValue* other = block.Find(target_name); other != nullptr) {
    if (alias.path == "bfloat16") {
      findings.Warn(member->at, "bfloat16 is ignored: bf16 is there too.");
    } else if (!SameJson(*other, member->value)) {
      findings.Error(member->at,
                     Concat(alias.path, " is another name of ", alias.target, " (",
                            PositionText(other->at), "), and their values differ; remove one"));
    }
    Erase(block, LeafName(alias.path));
    return;
  }
  if (alias.note == "deprecated" || alias.path == "aio.thread_count") {
    findings.Warn(member->at, Concat(alias.path, " is ", alias.target, " now: write that."));
  }
  if (alias.type == KeyType::kBlock) {
    for (const JsonMember& inner : member->value.members) {
      marks[Concat(alias.target, ".", inner.name)] = {ValueOrigin::kAlias,
                                                      Concat("written in ", alias.path)};
    }
  }
  marks[std::string(alias.target)] = {ValueOrigin::kAlias, Concat("written as ", alias.path)};
  member->name = std::string(target_name);
}

// cpu_offload: true is offload_optimizer: {device: cpu}; the same for cpu_offload_param.
void RewriteCpuOffload(const KeySpec& alias, JsonValue& block, Marks& marks, Findings& findings) {
  const JsonMember* member = FindMember(block, LeafName(alias.path));
  if (member == nullptr || member->value.is_string("auto")) return;
  const SourcePosition at = member->at;
  bool on = false;
  if (member->value.kind != Kind::kNull) {
    const absl::StatusOr<NormalisedValue> value = NormaliseValue(alias, member->value);
    if (!value.ok()) {
      findings.Error(at, Concat(alias.path, " ", Std(value.status().message())));
    } else if (block.Find(LeafName(alias.target)) != nullptr) {
      findings.Error(at, Concat(alias.path, " is the deprecated form of ", alias.target,
                                ", which is there too; remove it"));
    } else {
      on = value->value.boolean;
      findings.Warn(
          at, Concat(alias.path, " is deprecated: write ", alias.target, " with device cpu."));
    }
  }
  Erase(block, LeafName(alias.path));
  if (!on) return;
  JsonValue offload = MakeObject(at);
  JsonValue device;
  device.kind = Kind::kString;
  device.text = "cpu";
  device.at = at;
  offload.members.push_back({.name = "device", .at = at, .value = std::move(device)});
  block.members.push_back(
      {.name = std::string(LeafName(alias.target)), .at = at, .value = std::move(offload)});
  marks[Concat(alias.target, ".device")] = {ValueOrigin::kAlias, Concat("written as ", alias.path)};
}

// The table's name of a key that a client may give; empty when there is no such key.
std::string CanonicalClientPath(std::string_view path) {
  const KeySpec* spec = FindKey(path);
  if (spec != nullptr) {
    return std::string(spec->status == KeyStatus::kAlias ? spec->target : spec->path);
  }
  const std::string_view parent = ParentPath(path);
  const bool parameter = parent == "optimizer.params" || parent == "scheduler.params";
  return parameter && !LeafName(path).empty() ? std::string(path) : std::string();
}

// Puts one value at a path, making the blocks above it.
void PutClientValue(std::string_view path, const JsonValue& value, JsonValue& root, Marks& marks,
                    Findings& findings) {
  JsonValue* block = &root;
  std::string_view rest = path;
  while (true) {
    const std::size_t dot = rest.find('.');
    const std::string_view name = rest.substr(0, dot);
    JsonMember* member = FindMember(*block, name);
    if (member == nullptr) {
      block->members.push_back({.name = std::string(name), .at = {}, .value = {}});
      member = &block->members.back();
    }
    const bool open = member->value.kind == Kind::kNull || member->value.is_string("auto");
    if (dot == std::string_view::npos) {
      if (open) {
        member->value = value;
        marks[std::string(path)] = {ValueOrigin::kClient, ""};
      } else if (!SameJson(member->value, value)) {
        findings.Error(member->value.at, Concat(path, " is ", RenderJson(member->value),
                                                " in the file and ", RenderJson(value),
                                                " from the client; write \"auto\" in the file or "
                                                "change one of them"));
      }
      return;
    }
    if (open) member->value = MakeObject({});
    // A block of another kind is reported when it is read.
    if (!member->value.is_object()) return;
    block = &member->value;
    rest.remove_prefix(dot + 1);
  }
}

void ClearPositions(JsonValue& value) {
  value.at = SourcePosition();
  for (JsonValue& item : value.items) ClearPositions(item);
  for (JsonMember& member : value.members) {
    member.at = SourcePosition();
    ClearPositions(member.value);
  }
}

// Blocks are taken apart, so that each of their keys fills its own place.
void PutClientTree(const std::string& path, const JsonValue& value, JsonValue& root, Marks& marks,
                   Findings& findings) {
  if (value.is_string("auto")) return;
  const std::string canonical = CanonicalClientPath(path);
  if (canonical.empty()) {
    const std::string advice = AdviceForUnknownKey(path);
    findings.Error({}, Concat("the client gives a value for ", path, ", which is no known key",
                              advice.empty() ? "" : "; ", advice));
    return;
  }
  if (value.is_object()) {
    for (const JsonMember& member : value.members) {
      PutClientTree(Concat(canonical, ".", member.name), member.value, root, marks, findings);
    }
    return;
  }
  PutClientValue(canonical, value, root, marks, findings);
}

}  // namespace

void RewriteLegacyForms(JsonValue& root, Marks& marks, Findings& findings) {
  RewriteBooleanZero(root, marks, findings);
  for (const KeySpec* alias : AllKeys()) {
    if (alias->status != KeyStatus::kAlias) continue;
    JsonValue* block = FindBlock(root, ParentPath(alias->path));
    if (block == nullptr) continue;
    const KeySpec* target = FindKey(alias->target);
    if (target != nullptr && target->type == KeyType::kBlock && alias->type == KeyType::kBool) {
      RewriteCpuOffload(*alias, *block, marks, findings);
    } else {
      Rename(*alias, *block, marks, findings);
    }
  }
}

void ApplyClientValues(const ClientValues& client, JsonValue& root, Marks& marks,
                       Findings& findings) {
  for (const auto& [path, text] : client) {
    absl::StatusOr<JsonValue> value = ParseHjson(text);
    if (!value.ok()) {
      findings.Error({}, Concat("the client's value for ", path,
                                " is no JSON: ", Std(value.status().message())));
      continue;
    }
    ClearPositions(*value);
    PutClientTree(path, *value, root, marks, findings);
  }
}

}  // namespace zeroshard
