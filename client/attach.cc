#include "client/attach.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/fd_passing.h"
#include "base/status.h"
#include "client/completions.h"
#include "client/dataplane/loader.h"
#include "storage/partition.h"

namespace zeroshard {
namespace {

using trainer::v1::Region;

// Beyond the time that the daemon itself waits for the other ranks.
constexpr absl::Duration kAttachSlack = absl::Seconds(30);
// The same where the job may have an NVMe tier, whose files are written before it begins.
constexpr absl::Duration kNvmeSlack = absl::Minutes(61);
constexpr absl::Duration kDescriptorTimeout = absl::Seconds(30);

model::v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return model::v1::DTYPE_FLOAT32;
    case DType::kBfloat16:
      return model::v1::DTYPE_BFLOAT16;
    case DType::kFloat16:
      return model::v1::DTYPE_FLOAT16;
  }
  return model::v1::DTYPE_UNSPECIFIED;
}

trainer::v1::AttachRequest MakeRequest(const AttachOptions& options) {
  trainer::v1::AttachRequest request;
  request.set_job(options.job);
  request.set_rank(options.rank);
  request.set_world_size(options.world_size);
  request.set_local_ranks(options.local_ranks);
  for (const ParameterSpec& spec : options.parameters) {
    auto* parameter = request.mutable_manifest()->add_parameters();
    parameter->set_name(spec.name);
    for (const std::string& alias : spec.aliases) parameter->add_aliases(alias);
    for (const uint64_t dimension : spec.shape) parameter->add_shape(dimension);
    parameter->set_dtype(ToProto(spec.dtype));
    parameter->set_trainable(spec.trainable);
    parameter->set_group(spec.group);
    parameter->set_module(spec.module);
  }
  ToProto(options.groups, request.mutable_manifest()->mutable_groups());
  request.set_ds_config(options.ds_config);
  request.mutable_overrides()->insert(options.overrides.begin(), options.overrides.end());
  request.set_timeout_ms(static_cast<uint32_t>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(options.timeout), 1, INT32_MAX)));
  request.set_forward_only(options.forward_only);
  request.set_gave_up(options.gave_up);
  return request;
}

// Which GPU the rank is on, as far as it says.
absl::Status AddDevice(const AttachOptions& options, trainer::v1::AttachRequest& request) {
  if (!options.cuda_device.has_value()) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const DataPlaneLibrary* library, LoadDataPlaneLibrary());
  model::v1::Device& device = *request.mutable_device();
  if (*options.cuda_device == kWorkersDevice) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const DeviceFacts facts, library->device(*options.cuda_device));
  device.set_ordinal(static_cast<uint32_t>(facts.ordinal));
  device.set_name(facts.name);
  device.set_uuid(facts.uuid.data(), facts.uuid.size());
  return absl::OkStatus();
}

// Whether both sides mean a job on GPUs, or both do not.
absl::Status CheckKind(const AttachOptions& options, const trainer::v1::AttachReply& reply) {
  if (options.cuda_device.has_value() == reply.config().data_plane()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      reply.config().data_plane()
          ? "the job trains on GPUs, this rank on the host: set AttachOptions::cuda_device"
          : "this rank trains on a GPU, the job on the host: give the daemon CUDA devices");
}

absl::Duration Slack(const AttachOptions& options) {
  bool nvme = options.ds_config.find("nvme") != std::string::npos;
  for (const auto& [key, value] : options.overrides) {
    nvme |= value.find("nvme") != std::string::npos || key.find("nvme") != std::string::npos;
  }
  return nvme ? kNvmeSlack : kAttachSlack;
}

absl::StatusOr<std::vector<UniqueFd>> ReceiveDescriptors(const trainer::v1::AttachReply& reply) {
  ZS_ASSIGN_OR_RETURN(UniqueFd socket, ConnectUnix(reply.descriptor_socket(), kDescriptorTimeout));
  ZS_RETURN_IF_ERROR(SendMessage(socket.get(), reply.token(), {}, kDescriptorTimeout));
  ZS_ASSIGN_OR_RETURN(Message message, ReceiveMessage(socket.get(), kDescriptorTimeout));
  if (message.bytes != "ok") {
    return absl::PermissionDeniedError(
        absl::StrCat("the daemon hands out no memory: ", message.bytes));
  }
  if (message.fds.size() != static_cast<size_t>(reply.regions_size())) {
    return absl::DataLossError(absl::StrCat("the daemon sent ", message.fds.size(),
                                            " descriptors for ", reply.regions_size(), " regions"));
  }
  return std::move(message.fds);
}

// The region of `kind`, or an empty one where the reply lists none.
absl::StatusOr<MappedRegion> MapRegion(const trainer::v1::AttachReply& reply,
                                       const std::vector<UniqueFd>& fds, Region::Kind kind,
                                       Access access) {
  MappedRegion mapped;
  for (int i = 0; i < reply.regions_size(); ++i) {
    const Region& region = reply.regions(i);
    if (region.kind() != kind || region.bytes() == 0) continue;
    const std::string name = absl::StrCat("region ", Region::Kind_Name(kind));
    if (mapped.data() != nullptr) return absl::DataLossError(absl::StrCat(name, " came twice"));
    absl::Status sealed = VerifySealed(fds[i].get(), region.bytes());
    if (!sealed.ok()) return Annotate(sealed, name);
    auto result = MappedRegion::Map(fds[i].get(), region.bytes(), access, {.dont_fork = true});
    if (!result.ok()) return Annotate(result.status(), name);
    mapped = *std::move(result);
  }
  return mapped;
}

// What a rank on a GPU shares with its worker.
absl::Status TakeDeviceRegions(std::vector<UniqueFd>& fds, Attachment& attachment) {
  ZS_ASSIGN_OR_RETURN(
      attachment.device_counters,
      MapRegion(attachment.reply, fds, Region::KIND_DEVICE_COUNTERS, Access::kReadWrite));
  for (int i = 0; i < attachment.reply.regions_size(); ++i) {
    const Region& region = attachment.reply.regions(i);
    if (region.kind() != Region::KIND_DEVICE_SHARED) continue;
    attachment.device_shared = std::move(fds[i]);
    attachment.device_shared_bytes = region.bytes();
  }
  if (!attachment.reply.config().data_plane()) return absl::OkStatus();
  if (attachment.device_counters.data() == nullptr || attachment.device_shared_bytes == 0) {
    return absl::DataLossError("the daemon handed out no device memory of the rank's worker");
  }
  return absl::OkStatus();
}

absl::Status CheckSizes(const Attachment& attachment) {
  if (attachment.parameter_window.size() < attachment.layout.window_bytes()) {
    return absl::DataLossError(
        absl::StrCat("the parameter window has ", attachment.parameter_window.size(),
                     " bytes, the layout needs ", attachment.layout.window_bytes()));
  }
  const uint64_t ring = ParameterRingBytes(attachment.layout, attachment.reply.config());
  if (attachment.gradient_window->size() < ring) {
    return absl::DataLossError(absl::StrCat("the gradient window has ",
                                            attachment.gradient_window->size(),
                                            " bytes, the ring of parameters ", ring));
  }
  if (attachment.rank_page.data() == nullptr) {
    return absl::DataLossError("the daemon handed out no completion page");
  }
  return Completions::Validate(*attachment.rank_page.As<RankPage>(), attachment.rank_page.size());
}

}  // namespace

absl::StatusOr<Attachment> AttachRank(const DaemonClient& daemon, const AttachOptions& options) {
  // The number of workers is the daemon's affair, and does not change what a trainer sees.
  ZS_ASSIGN_OR_RETURN(Layout layout, Layout::Create(options.parameters, /*workers=*/1));
  trainer::v1::AttachRequest request = MakeRequest(options);
  ZS_RETURN_IF_ERROR(AddDevice(options, request));
  ZS_ASSIGN_OR_RETURN(trainer::v1::AttachReply reply,
                      daemon.Attach(request, options.timeout + Slack(options)));
  ZS_RETURN_IF_ERROR(CheckKind(options, reply));
  if (reply.layout_fingerprint() != layout.fingerprint()) {
    return absl::FailedPreconditionError(
        absl::StrCat("daemon and client lay the parameters out differently (fingerprints ",
                     absl::Hex(reply.layout_fingerprint()), " and ",
                     absl::Hex(layout.fingerprint()), "): do they have the same version?"));
  }
  ZS_FAULT_POINT("client.attach.before_map");
  ZS_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, ReceiveDescriptors(reply));
  Attachment attachment{.reply = std::move(reply),
                        .layout = std::move(layout),
                        .parameter_window = {},
                        .gradient_window = nullptr,
                        .rank_page = {},
                        .device_shared = {},
                        .device_counters = {}};
  ZS_ASSIGN_OR_RETURN(
      attachment.parameter_window,
      MapRegion(attachment.reply, fds, Region::KIND_PARAMETER_WINDOW, Access::kReadOnly));
  ZS_ASSIGN_OR_RETURN(
      MappedRegion gradients,
      MapRegion(attachment.reply, fds, Region::KIND_GRADIENT_WINDOW, Access::kReadWrite));
  attachment.gradient_window = std::make_shared<const MappedRegion>(std::move(gradients));
  ZS_ASSIGN_OR_RETURN(attachment.rank_page,
                      MapRegion(attachment.reply, fds, Region::KIND_RANK_PAGE, Access::kReadOnly));
  ZS_RETURN_IF_ERROR(TakeDeviceRegions(fds, attachment));
  ZS_RETURN_IF_ERROR(CheckSizes(attachment));
  return attachment;
}

}  // namespace zeroshard
