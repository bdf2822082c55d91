#include "tests/transport/nccl/collectives.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(30);

NcclGather Prepare(Rank& rank, uint32_t self, uint32_t number, const std::vector<uint64_t>& sizes,
                   Placement placement) {
  NcclGather gather;
  uint64_t total = 0;
  for (const uint64_t bytes : sizes) total += bytes;
  NcclBuffer together = placement == Placement::kApart ? NcclBuffer{} : rank.Place(total);
  for (const uint64_t bytes : sizes) {
    if (placement == Placement::kApart) {
      gather.receive.push_back(rank.Place(bytes));
    } else {
      gather.receive.push_back({together.address, bytes});
      together.address += bytes;
    }
  }
  const Bytes content = PatternOf(self, number, sizes[self]);
  if (placement == Placement::kInPlace) {
    rank.Write(gather.receive[self], content);
    gather.send = gather.receive[self];
  } else {
    gather.send = rank.PlaceOf(content);
  }
  return gather;
}

absl::Status CheckPiece(Rank& rank, const NcclBuffer& piece, const Bytes& expected,
                        const std::string& what) {
  if (rank.Read(piece) == expected) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(what, " differs"));
}

}  // namespace

absl::Status GatherAndCheck(Rank& rank, NcclCommunicator& communicator,
                            const std::vector<std::vector<uint64_t>>& sizes, Placement placement,
                            const GatherFunction& gather) {
  std::vector<NcclGather> gathers;
  for (uint32_t number = 0; number < sizes.size(); ++number) {
    gathers.push_back(Prepare(rank, communicator.rank(), number, sizes[number], placement));
  }
  ZS_RETURN_IF_ERROR(gather(rank.stream(), gathers));
  ZS_RETURN_IF_ERROR(communicator.Synchronize(rank.done(), kTimeout));
  for (uint32_t number = 0; number < sizes.size(); ++number) {
    for (uint32_t from = 0; from < communicator.ranks(); ++from) {
      ZS_RETURN_IF_ERROR(CheckPiece(rank, gathers[number].receive[from],
                                    PatternOf(from, number, sizes[number][from]),
                                    absl::StrCat("piece ", from, " of gather ", number)));
    }
  }
  return absl::OkStatus();
}

uint64_t SizeOfMessage(uint32_t from, uint32_t to) {
  return (from + 2 * to) % 3 == 0 ? 0 : 1000 * from + 77 * to + 13;
}

absl::Status ExchangeAndCheck(Rank& rank, NcclCommunicator& communicator) {
  const uint32_t self = communicator.rank();
  std::vector<NcclBuffer> sends;
  std::vector<NcclBuffer> receives;
  for (uint32_t peer = 0; peer < communicator.ranks(); ++peer) {
    sends.push_back(rank.PlaceOf(PatternOf(self, peer, SizeOfMessage(self, peer))));
    receives.push_back(rank.Place(SizeOfMessage(peer, self)));
  }
  ZS_RETURN_IF_ERROR(communicator.Exchange(rank.stream(), sends, receives));
  ZS_RETURN_IF_ERROR(communicator.Synchronize(rank.done(), kTimeout));
  for (uint32_t peer = 0; peer < communicator.ranks(); ++peer) {
    ZS_RETURN_IF_ERROR(CheckPiece(rank, receives[peer],
                                  PatternOf(peer, self, SizeOfMessage(peer, self)),
                                  absl::StrCat("the message of rank ", peer)));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
