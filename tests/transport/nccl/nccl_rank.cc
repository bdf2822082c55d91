// A rank that is a process: tests/transport/nccl/process_test.cc starts some of them, and
// tests/gpu/run one with the real NCCL.
//   nccl_rank library [local|global FILE]         which NCCL is found, when this one is loaded
//   already nccl_rank alone                               a world of one rank from creation to
//   abort nccl_rank id                                  prints a unique id nccl_rank run RANK RANKS
//   ID [victim|survivor] collectives; a victim then says "ready" and sleeps,
//                                                 a survivor waits for what it will not send
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/status.h"
#include "tests/transport/nccl/collectives.h"
#include "transport/nccl/node_gather.h"

namespace zeroshard {
namespace {

void Print(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

absl::Status FindLibrary(const std::vector<std::string>& words) {
  if (words.size() == 3) {
    const int mode = RTLD_NOW | (words[1] == "global" ? RTLD_GLOBAL : RTLD_LOCAL);
    if (::dlopen(words[2].c_str(), mode) == nullptr) return absl::NotFoundError(::dlerror());
  }
  ZS_ASSIGN_OR_RETURN(const NcclLibrary library, NcclLibrary::Load());
  Print(library.description());
  return absl::OkStatus();
}

absl::Status PrintId() {
  ZS_ASSIGN_OR_RETURN(const NcclLibrary library, NcclLibrary::Load());
  ZS_ASSIGN_OR_RETURN(const NcclUniqueId id, library.MakeUniqueId());
  Print(absl::BytesToHexString({reinterpret_cast<const char*>(id.data()), id.size()}));
  return absl::OkStatus();
}

absl::Status Collectives(Rank& rank, NcclCommunicator& world) {
  std::vector<uint64_t> sizes;
  std::vector<uint32_t> nodes;
  for (uint32_t peer = 0; peer < world.ranks(); ++peer) {
    sizes.push_back(100000 + 7 * peer);
    nodes.push_back(peer == 0 ? 0 : 1);
  }
  const std::vector<uint64_t> even(world.ranks(), 65536);
  ZS_RETURN_IF_ERROR(GatherAndCheck(rank, world, {sizes, even}, Placement::kTogether,
                                    [&](CUstream_st* stream, std::span<const NcclGather> gathers) {
                                      return world.AllGather(stream, gathers);
                                    }));
  ZS_RETURN_IF_ERROR(ExchangeAndCheck(rank, world));
  ZS_ASSIGN_OR_RETURN(const auto levels, NodeGather::Create(world, nodes));
  ZS_RETURN_IF_ERROR(GatherAndCheck(rank, world, {sizes}, Placement::kInPlace,
                                    [&](CUstream_st* stream, std::span<const NcclGather> gathers) {
                                      return levels->AllGather(stream, gathers);
                                    }));
  return levels->Close();
}

// Registered memory, an orderly end, and an abort with work on the stream.
absl::Status RunAlone() {
  ZS_ASSIGN_OR_RETURN(const NcclLibrary library, NcclLibrary::Load());
  Print(library.description());
  ZS_ASSIGN_OR_RETURN(const auto rank, Rank::Create(0));
  for (const bool aborts : {false, true}) {
    ZS_ASSIGN_OR_RETURN(const NcclUniqueId id, library.MakeUniqueId());
    ZS_ASSIGN_OR_RETURN(const auto world, NcclCommunicator::Create(library, id, 0, 1, {}));
    ZS_RETURN_IF_ERROR(world->Register(rank->memory()));
    ZS_RETURN_IF_ERROR(Collectives(*rank, *world));
    if (!aborts) {
      ZS_RETURN_IF_ERROR(world->Unregister(rank->memory()));
      ZS_RETURN_IF_ERROR(world->Close());
      continue;
    }
    const std::vector<NcclBuffer> buffers(1, rank->Place(4096));
    ZS_RETURN_IF_ERROR(world->Exchange(rank->stream(), buffers, buffers));
    if (!world->Abort(absl::Seconds(5))) return absl::InternalError("the abort hangs");
    if (!rank->Passed(absl::Seconds(5))) return absl::InternalError("the stream is stuck");
  }
  Print("done");
  return absl::OkStatus();
}

absl::Status Survive(Rank& rank, NcclCommunicator& world) {
  const std::vector<NcclBuffer> buffers(world.ranks(), rank.Place(4096));
  ZS_RETURN_IF_ERROR(world.Exchange(rank.stream(), buffers, buffers));
  Print("waiting");
  const absl::Status status = world.Synchronize(rank.done(), absl::Seconds(3));
  if (!world.Abort(absl::Seconds(5))) return absl::InternalError("the abort hangs");
  if (!rank.Passed(absl::Seconds(5))) return absl::InternalError("the stream is stuck");
  Print(absl::StatusCodeToString(status.code()));
  return absl::OkStatus();
}

absl::Status RunRank(uint32_t number, uint32_t ranks, const std::string& hex,
                     const std::string& role) {
  const std::string bytes = absl::HexStringToBytes(hex);
  NcclUniqueId id;
  if (bytes.size() != id.size()) return absl::InvalidArgumentError("the id is of another length");
  std::memcpy(id.data(), bytes.data(), id.size());
  ZS_ASSIGN_OR_RETURN(const NcclLibrary library, NcclLibrary::Load());
  ZS_ASSIGN_OR_RETURN(const auto rank, Rank::Create(number));
  ZS_ASSIGN_OR_RETURN(const auto world, NcclCommunicator::Create(library, id, number, ranks, {}));
  ZS_RETURN_IF_ERROR(Collectives(*rank, *world));
  if (role == "survivor") return Survive(*rank, *world);
  if (role == "victim") {
    Print("ready");
    ::sleep(60);
  }
  ZS_RETURN_IF_ERROR(world->Close());
  Print("done");
  return absl::OkStatus();
}

absl::Status Main(const std::vector<std::string>& words) {
  if (words.empty()) return absl::InvalidArgumentError("no command");
  if (words[0] == "library") return FindLibrary(words);
  if (words[0] == "id") return PrintId();
  if (words[0] == "alone") return RunAlone();
  if (words.size() < 4) return absl::InvalidArgumentError("run RANK RANKS ID [ROLE]");
  return RunRank(static_cast<uint32_t>(std::stoul(words[1])),
                 static_cast<uint32_t>(std::stoul(words[2])), words[3],
                 words.size() > 4 ? words[4] : "");
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  const absl::Status status = zeroshard::Main({argv + 1, argv + argc});
  if (status.ok()) return 0;
  zeroshard::Print(status.ToString());
  return 1;
}
