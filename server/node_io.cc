#include "server/node_io.h"

#include "base/status.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<NodeIo>> NodeIo::Create(const Clock* clock, const IoLimits& limits) {
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, CreateSealedMemfd("zeroshard:io", IoBudget::Bytes()));
  ZS_ASSIGN_OR_RETURN(MappedRegion memory,
                      MappedRegion::Map(fd.get(), IoBudget::Bytes(), Access::kReadWrite));
  ZS_ASSIGN_OR_RETURN(IoBudget budget, IoBudget::Format(memory.bytes(), clock));
  return std::unique_ptr<NodeIo>(
      new NodeIo(std::move(fd), std::move(memory), std::move(budget), limits));
}

absl::StatusOr<std::shared_ptr<const IoHolder>> NodeIo::Add(const std::string& job,
                                                            uint32_t worker) const {
  ZS_ASSIGN_OR_RETURN(const uint32_t number, budget_.AddHolder(job, worker));
  return std::make_shared<const IoHolder>(budget_, number);
}

internal::v1::WorkerRegion NodeIo::Describe(const IoHolder& holder) const {
  internal::v1::WorkerRegion region;
  region.set_kind(internal::v1::WorkerRegion::KIND_IO_BUDGET);
  region.set_index(holder.number());
  region.set_bytes(IoBudget::Bytes());
  return region;
}

}  // namespace zeroshard
