// What ranks of tests do together, and what must come of it. In threads and in processes alike.
#ifndef ZEROSHARD_TESTS_TRANSPORT_NCCL_COLLECTIVES_H_
#define ZEROSHARD_TESTS_TRANSPORT_NCCL_COLLECTIVES_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "tests/transport/nccl/rank.h"
#include "transport/nccl/communicator.h"

namespace zeroshard {

enum class Placement : uint8_t { kTogether, kApart, kInPlace };

using GatherFunction =
    std::function<absl::Status(CUstream_st* stream, std::span<const NcclGather> gathers)>;

// One operation with a gather for each list of sizes (by rank), checked byte for byte; DataLoss
// where a byte differs. kTogether: the pieces lie one after the other.
absl::Status GatherAndCheck(Rank& rank, NcclCommunicator& communicator,
                            const std::vector<std::vector<uint64_t>>& sizes, Placement placement,
                            const GatherFunction& gather);

// Rank s sends to rank r SizeOfMessage(s, r) bytes.
uint64_t SizeOfMessage(uint32_t from, uint32_t to);
absl::Status ExchangeAndCheck(Rank& rank, NcclCommunicator& communicator);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_TRANSPORT_NCCL_COLLECTIVES_H_
