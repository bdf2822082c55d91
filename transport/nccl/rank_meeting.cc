#include "transport/nccl/rank_meeting.h"

#include <cstring>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/deadline.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr char kWorldKey[] = "nccl/world";
constexpr char kIds[] = "ids";
constexpr char kRefused[] = "refused";

std::string RankKey(uint32_t rank) { return absl::StrCat("nccl/rank/", rank); }

absl::Status BadValue(const std::string& key) {
  return absl::DataLossError(absl::StrCat("the value of the rendezvous key ", key,
                                          " is of another form than this version writes"));
}

struct Facts {
  int version = 0;
  std::string node;
};

absl::StatusOr<Facts> ParseFacts(const std::string& key, const std::string& value) {
  const std::vector<std::string> lines = absl::StrSplit(value, '\n');
  Facts facts;
  if (lines.size() != 2 || !absl::SimpleAtoi(lines[0], &facts.version)) return BadValue(key);
  facts.node = lines[1];
  return facts;
}

// What rank 0 tells all.
absl::StatusOr<std::string> MakeWorld(const NcclLibrary& library,
                                      const RendezvousFunction& rendezvous,
                                      const MeetingOptions& options, const Deadline& deadline) {
  std::map<std::string, uint32_t> numbers;
  std::vector<uint32_t> node_of_rank;
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    const std::string key = RankKey(rank);
    absl::StatusOr<std::string> value = rendezvous(key, std::nullopt, deadline.Remaining());
    if (!value.ok()) return Annotate(value.status(), absl::StrCat("waiting for rank ", rank));
    ZS_ASSIGN_OR_RETURN(const Facts facts, ParseFacts(key, *value));
    if (facts.version != library.version()) {
      return absl::StrCat(
          kRefused, "\nrank 0 has NCCL ", library.version(), ", rank ", rank, " has ",
          facts.version, " (as in NCCL_VERSION_CODE): all trainers of a job need the same version");
    }
    const auto number = static_cast<uint32_t>(numbers.size());
    node_of_rank.push_back(numbers.emplace(facts.node, number).first->second);
  }
  std::vector<std::string> ids;
  for (uint32_t i = 0; i < options.communicators; ++i) {
    ZS_ASSIGN_OR_RETURN(const NcclUniqueId id, library.MakeUniqueId());
    ids.push_back(absl::BytesToHexString({reinterpret_cast<const char*>(id.data()), id.size()}));
  }
  return absl::StrCat(kIds, "\n", absl::StrJoin(ids, ","), "\n", absl::StrJoin(node_of_rank, ","));
}

absl::StatusOr<Meeting> ParseWorld(const std::string& value, const MeetingOptions& options) {
  const std::vector<std::string> lines = absl::StrSplit(value, '\n');
  if (lines.size() == 2 && lines[0] == kRefused) return absl::FailedPreconditionError(lines[1]);
  if (lines.size() != 3 || lines[0] != kIds) return BadValue(kWorldKey);
  Meeting meeting;
  for (const auto hex : absl::StrSplit(lines[1], ',')) {
    const std::string bytes = absl::HexStringToBytes(hex);
    NcclUniqueId id;
    if (bytes.size() != id.size()) return BadValue(kWorldKey);
    std::memcpy(id.data(), bytes.data(), id.size());
    meeting.ids.push_back(id);
  }
  for (const auto text : absl::StrSplit(lines[2], ',')) {
    uint32_t number = 0;
    if (!absl::SimpleAtoi(text, &number)) return BadValue(kWorldKey);
    meeting.node_of_rank.push_back(number);
  }
  if (meeting.ids.size() != options.communicators || meeting.node_of_rank.size() != options.ranks) {
    return BadValue(kWorldKey);
  }
  return meeting;
}

}  // namespace

absl::StatusOr<Meeting> MeetRanks(const NcclLibrary& library, const RendezvousFunction& rendezvous,
                                  const MeetingOptions& options) {
  const Deadline deadline = Deadline::After(options.timeout);
  const std::string own = absl::StrCat(library.version(), "\n", options.node);
  ZS_RETURN_IF_ERROR(rendezvous(RankKey(options.rank), own, deadline.Remaining()).status());
  std::optional<std::string> world;
  if (options.rank == 0) {
    ZS_ASSIGN_OR_RETURN(world, MakeWorld(library, rendezvous, options, deadline));
  }
  absl::StatusOr<std::string> value = rendezvous(kWorldKey, world, deadline.Remaining());
  if (!value.ok()) return Annotate(value.status(), "waiting for all ranks");
  return ParseWorld(*value, options);
}

}  // namespace zeroshard
