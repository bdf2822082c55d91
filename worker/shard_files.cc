#include "worker/shard_files.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "proto/records.pb.h"
#include "storage/checkpoint.h"
#include "storage/shard_writer.h"
#include "worker/parameter_export.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {
namespace {

using Extent = Shard::Extent;

GrainRange Intersect(GrainRange a, GrainRange b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// Calls fn(grains) for consecutive parts of `grains` that fit in a record.
template <typename Fn>
absl::Status InPieces(GrainRange grains, const Fn& fn) {
  for (uint64_t grain = grains.begin; grain < grains.end; grain += kMaxRecordGrains) {
    ZS_RETURN_IF_ERROR(fn(GrainRange{grain, std::min(grains.end, grain + kMaxRecordGrains)}));
  }
  return absl::OkStatus();
}

absl::Status SaveArray(const Shard& shard, uint32_t unit, const StateArray& array,
                       ShardWriter& writer) {
  if (array.source == StateArray::Source::kMemory) {
    return writer.Append(unit, array.grains, array.kind, array.type, array.bytes);
  }
  std::vector<std::byte> piece[1];
  return InPieces(array.grains, [&](GrainRange grains) -> absl::Status {
    ZS_RETURN_IF_ERROR(shard.ReadArrays(unit, {&array, 1}, grains, piece));
    return writer.Append(unit, grains, array.kind, array.type, piece[0]);
  });
}

absl::Status SaveUnit(const Shard& shard, uint32_t unit, uint64_t unit_grains,
                      ShardWriter& writer) {
  const std::vector<StateArray> arrays = shard.StateArrays(unit, Extent::kShard);
  if (!shard.OnTier(unit)) {
    for (const StateArray& array : arrays) {
      ZS_RETURN_IF_ERROR(SaveArray(shard, unit, array, writer));
    }
    return absl::OkStatus();
  }
  // Each image is read once.
  std::vector<std::vector<std::byte>> pieces(arrays.size());
  for (const GrainRange& run : shard.Runs(unit, {0, unit_grains})) {
    ZS_RETURN_IF_ERROR(shard.ReadArrays(unit, arrays, run, pieces));
    for (size_t i = 0; i < arrays.size(); ++i) {
      const GrainRange part = Intersect(arrays[i].grains, run);
      if (part.size() == 0) continue;
      ZS_RETURN_IF_ERROR(writer.Append(unit, part, arrays[i].kind, arrays[i].type, pieces[i]));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SaveShard(Engine& engine, const internal::v1::SaveShard& command,
                                   int dir_fd) {
  const EngineContext& context = engine.context();
  const size_t units = context.layout().units().size();
  uint64_t expected = 0;
  for (uint32_t unit = 0; unit < units; ++unit) {
    for (const StateArray& array : engine.shard().StateArrays(unit, Extent::kShard)) {
      expected += array.size();
    }
  }
  const CheckpointIdentity identity{.job_id = context.memory().start().job_id(),
                                    .layout_fingerprint = context.layout().fingerprint(),
                                    .step = context.board().numbers().step};
  ZS_ASSIGN_OR_RETURN(ShardWriter writer,
                      ShardWriter::Create(dir_fd, context.me(), identity, expected));
  for (uint32_t unit = 0; unit < units; ++unit) {
    if (command.exclude_frozen() && !context.layout().units()[unit].trainable) continue;
    const uint64_t grains = context.layout().units()[unit].grains;
    ZS_RETURN_IF_ERROR(SaveUnit(engine.shard(), unit, grains, writer));
  }
  return std::move(writer).Finish();
}

// The master of a unit whose checkpoint holds none: the parameter's value, read in bounded pieces.
absl::Status MasterFromParameter(CheckpointReader& reader, const Shard& shard, uint32_t unit,
                                 DType dtype, const StateArray& master, GrainRange part) {
  std::vector<std::byte> piece;
  std::vector<float> values;
  return InPieces(part, [&](GrainRange grains) -> absl::Status {
    piece.resize(grains.elements() * SizeOf(dtype));
    ZS_RETURN_IF_ERROR(reader.Read(unit, grains, kKindParameter, dtype, piece));
    values.resize(grains.elements());
    ConvertElements(piece.data(), dtype, values.data(), DType::kFloat32, values.size());
    shard.WriteArray(unit, master, grains, std::as_bytes(std::span(values)));
    return absl::OkStatus();
  });
}

absl::Status RestoreArray(CheckpointReader& reader, const Shard& shard, uint32_t unit,
                          const StateArray& array, GrainRange part) {
  // A master goes through WriteArray, which gives it this job's form.
  if (array.source == StateArray::Source::kMemory && array.kind != kKindMaster) {
    const uint64_t bytes = array.type.grain_bytes();
    return reader.Read(
        unit, part, array.kind, array.type,
        array.bytes.subspan((part.begin - array.grains.begin) * bytes, part.size() * bytes));
  }
  std::vector<std::byte> piece;
  return InPieces(part, [&](GrainRange grains) -> absl::Status {
    piece.resize(grains.size() * array.type.grain_bytes());
    ZS_RETURN_IF_ERROR(reader.Read(unit, grains, array.kind, array.type, piece));
    shard.WriteArray(unit, array, grains, piece);
    return absl::OkStatus();
  });
}

// Whether the checkpoint has all that RestoreUnit will read; another optimizer leaves other states.
absl::Status CheckStates(Engine& engine, const CheckpointReader& reader, uint32_t unit,
                         bool parameters_only) {
  const Unit& layout_unit = engine.context().layout().units()[unit];
  if (!reader.Has(unit, kKindParameter)) {
    if (!layout_unit.trainable) return absl::OkStatus();  // left out as frozen
    return absl::DataLossError(
        absl::StrCat("the checkpoint holds no parameters of ", engine.context().UnitName(unit)));
  }
  if (parameters_only) return absl::OkStatus();
  for (const StateArray& array : engine.shard().StateArrays(unit, Extent::kSlice)) {
    if (reader.Has(unit, array.kind) && !(reader.TypeOf(unit, array.kind) == array.type)) {
      return absl::FailedPreconditionError(
          absl::StrCat("the checkpoint holds ", array.kind, " of ", engine.context().UnitName(unit),
                       " as ", Abs(reader.TypeOf(unit, array.kind).name()),
                       ", this job holds it as ", Abs(array.type.name()),
                       ": configure the same optimizer_states, or load the parameters alone"));
    }
    if (array.kind == kKindMaster || reader.Has(unit, array.kind)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the checkpoint holds no ", array.kind, " of ", engine.context().UnitName(unit),
        ": it was written with another optimizer or by a forward-only job; load the parameters "
        "alone"));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> RestoreRun(CheckpointReader& reader, const Shard& shard, uint32_t unit,
                                    DType dtype, GrainRange run, bool parameters_only) {
  uint64_t bytes = 0;
  for (const StateArray& array : shard.StateArrays(unit, Extent::kSlice)) {
    const GrainRange part = Intersect(array.grains, run);
    if (part.size() == 0) continue;
    const bool derive =
        array.kind == kKindMaster && (parameters_only || !reader.Has(unit, kKindMaster));
    if (derive) {
      ZS_RETURN_IF_ERROR(MasterFromParameter(reader, shard, unit, dtype, array, part));
    } else if (!parameters_only || array.kind == kKindParameter) {
      ZS_RETURN_IF_ERROR(RestoreArray(reader, shard, unit, array, part));
    }
    bytes += part.size() * array.type.grain_bytes();
  }
  return bytes;
}

absl::StatusOr<uint64_t> RestoreUnit(Engine& engine, CheckpointReader& reader, uint32_t unit,
                                     bool parameters_only) {
  const Unit& layout_unit = engine.context().layout().units()[unit];
  uint64_t bytes = 0;
  if (!reader.Has(unit, kKindParameter)) return bytes;  // left out as frozen
  const Shard& shard = engine.shard();
  // What is damaged on the NVMe tier does not matter where all of it is replaced.
  const auto old = parameters_only ? Shard::OldContents::kKept : Shard::OldContents::kDropped;
  for (const GrainRange& run : shard.Runs(unit, {0, layout_unit.grains})) {
    ZS_RETURN_IF_ERROR(shard.OpenRun(unit, run, old));
    ZS_ASSIGN_OR_RETURN(const uint64_t run_bytes,
                        RestoreRun(reader, shard, unit, layout_unit.dtype, run, parameters_only));
    shard.MasterOfParameters(unit, run);
    ZS_RETURN_IF_ERROR(shard.SettleRun(unit, run));
    bytes += run_bytes;
  }
  return bytes;
}

absl::StatusOr<uint64_t> RestoreShard(Engine& engine, const internal::v1::RestoreShard& command,
                                      int dir_fd, internal::v1::ShardDone& done) {
  const EngineContext& context = engine.context();
  ZS_ASSIGN_OR_RETURN(CheckpointReader reader, CheckpointReader::Open(dir_fd));
  if (reader.manifest().layout_fingerprint() != context.layout().fingerprint()) {
    return absl::FailedPreconditionError(
        "the checkpoint was written for other parameters (names, shapes, data types or modules "
        "differ)");
  }
  records::v1::JobState state;
  if (!state.ParseFromString(command.job_state()))
    return absl::DataLossError("job state not readable");
  // All is verified before the first byte of state changes.
  ZS_RETURN_IF_ERROR(reader.Verify());
  for (uint32_t unit = 0; unit < context.layout().units().size(); ++unit) {
    ZS_RETURN_IF_ERROR(CheckStates(engine, reader, unit, command.parameters_only()));
  }
  uint64_t bytes = 0;
  for (uint32_t unit = 0; unit < context.layout().units().size(); ++unit) {
    ZS_ASSIGN_OR_RETURN(const uint64_t unit_bytes,
                        RestoreUnit(engine, reader, unit, command.parameters_only()));
    bytes += unit_bytes;
  }
  ZS_RETURN_IF_ERROR(engine.FinishRestore(state, command.parameters_only()));
  for (const std::string& user_state : state.user_states()) done.add_user_states(user_state);
  return bytes;
}

absl::StatusOr<uint64_t> Run(Engine& engine, const internal::v1::ToWorker& command, int fd,
                             internal::v1::ShardDone& done) {
  if (!engine.AtBoundary()) {
    return absl::FailedPreconditionError("a step is being applied: call between two steps");
  }
  if (command.has_save()) {
    if (engine.context().is_leader()) done.set_job_state(engine.JobState().SerializeAsString());
    return SaveShard(engine, command.save(), fd);
  }
  if (command.has_restore()) return RestoreShard(engine, command.restore(), fd, done);
  return ExportParameters(engine, fd);
}

}  // namespace

internal::v1::ShardDone RunShardCommand(Engine& engine, const internal::v1::ToWorker& command,
                                        const std::vector<UniqueFd>& fds) {
  internal::v1::ShardDone done;
  done.set_request(command.has_save()      ? command.save().request()
                   : command.has_restore() ? command.restore().request()
                                           : command.export_file().request());
  absl::StatusOr<uint64_t> bytes = absl::InvalidArgumentError("the command brings no descriptor");
  if (fds.size() == 1) bytes = Run(engine, command, fds[0].get(), done);
  if (bytes.ok()) {
    done.set_bytes(*bytes);
  } else {
    done.set_code(static_cast<uint32_t>(bytes.status().raw_code()));
    done.set_message(std::string(bytes.status().message()));
  }
  done.set_step(engine.context().board().numbers().step);
  return done;
}

}  // namespace zeroshard
