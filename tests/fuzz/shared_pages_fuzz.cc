// sources: storage/board.cc storage/undo_area.cc client/completions.cc
// sources: base/futex.cc base/status.cc base/check.cc
// libs: absl_status absl_statusor absl_strings absl_str_format absl_synchronization absl_time
// seeds: tests/fuzz/seeds/shared_pages

// Pages that another process wrote: the completion page, the board, user states, undo records. Each
// starts valid, then the input writes 64-bit words anywhere into it, and then it is adopted and
// read. No crash, no access outside of the page, no endless loop, whatever the words are.
//
// input = kind (1 byte) { offset (4 bytes) word (8 bytes) }

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "client/completions.h"
#include "storage/board.h"
#include "storage/rank_page.h"
#include "storage/undo_area.h"

namespace zeroshard {
namespace {

using Input = std::span<const std::uint8_t>;

void Require(bool condition) {
  if (!condition) std::abort();
}

// Memory of exactly `bytes`, so that the sanitizer sees what lies outside.
class Page {
 public:
  explicit Page(size_t bytes)
      : memory_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{64}))),
        bytes_(bytes) {
    std::memset(memory_.get(), 0, bytes);
  }

  std::byte* data() const { return memory_.get(); }
  std::span<std::byte> bytes() const { return {memory_.get(), bytes_}; }

  void Overwrite(Input input) const {
    for (size_t at = 0; at + 12 <= input.size(); at += 12) {
      std::uint32_t offset = 0;
      std::memcpy(&offset, input.data() + at, sizeof(offset));
      offset = offset % (bytes_ - 8) / 4 * 4;
      std::memcpy(memory_.get() + offset, input.data() + at + 4, 8);
    }
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t bytes_;
};

void ReadCompletionPage(Input input) {
  const Page memory(sizeof(RankPage));
  auto* page = new (memory.data()) RankPage;
  memory.Overwrite(input);
  if (!Completions::Validate(*page, sizeof(RankPage)).ok()) return;
  const Completions completions(*page);
  static_cast<void>(completions.CheckUnused().ok());
  for (const std::uint64_t id : {0ull, 1ull, 4095ull, 4096ull, ~0ull >> 2}) {
    static_cast<void>(completions.Look(id));
  }
  StepResult result;
  static_cast<void>(completions.ReadStepResult(result));
  static_cast<void>(completions.poisoned());
  completions.Await(completions.ticket(), absl::ZeroDuration());
}

void ReadBoard(Input input) {
  const BoardShape shape = {.workers = 2, .ranks = 2, .units = 3, .parameters = 5};
  const Page memory(Board::Bytes(shape));
  Require(Board::Format(memory.bytes(), shape, 7, 9, 65536.0, 2).ok());
  Require(Board::Adopt(memory.bytes(), shape, 7, 9).ok());
  Require(!Board::Adopt(memory.bytes(), shape, 8, 9).ok());
  memory.Overwrite(input);
  const absl::StatusOr<Board> board = Board::Adopt(memory.bytes(), shape, 7, 9);
  if (!board.ok()) return;
  static_cast<void>(board->numbers().step);
  static_cast<void>(board->committed_attempt());
  for (std::uint32_t worker = 0; worker < shape.workers; ++worker) {
    Require(board->dirty(worker).size() >= 1);
    for (std::uint32_t unit = 0; unit < shape.units; ++unit) {
      static_cast<void>(board->merged(worker, unit).tag.load());
      static_cast<void>(board->initialized(worker, unit).load());
    }
  }
}

void ReadUserStates(Input input) {
  constexpr std::uint32_t kRanks = 2;
  constexpr std::uint64_t kCapacity = 100;
  const Page memory(UserStates::Bytes(kRanks, kCapacity));
  const UserStates states(memory.bytes(), kRanks, kCapacity);
  const std::vector<std::byte> text(60, std::byte{'x'});
  Require(states.Write(1, 3, 2, text).ok());
  memory.Overwrite(input);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const std::span<const std::byte> bytes = states.Read(rank, 3);
    Require(bytes.size() <= kCapacity);
    Require(std::count(bytes.begin(), bytes.end(), std::byte{'x'}) <= 60 + kCapacity);
  }
}

void RecoverUndoArea(Input input) {
  constexpr std::uint32_t kLanes = 2;
  constexpr std::uint32_t kChunks = 3;
  constexpr std::uint64_t kElements = 300;
  const Page memory(UndoArea::BytesNeeded(kLanes, kChunks));
  Require(UndoArea::Format(memory.data(), memory.bytes().size(), kLanes, kChunks).ok());
  memory.Overwrite(input);
  const absl::StatusOr<UndoArea> area = UndoArea::Adopt(memory.data(), memory.bytes().size());
  if (!area.ok()) return;
  Require(UndoArea::BytesNeeded(area->lanes(), area->chunks()) <= memory.bytes().size());
  std::vector<float> array(kElements);
  const auto resolve = [&](const UndoKey&, std::uint32_t chunk) -> absl::StatusOr<UndoChunk> {
    if (chunk >= kChunks) return absl::DataLossError("no such chunk");
    UndoChunk found;
    found.arrays[0] = {reinterpret_cast<std::byte*>(array.data()), sizeof(float)};
    found.array_count = 1;
    found.elements = kElements;
    return found;
  };
  static_cast<void>(area->Recover(resolve).ok());
  for (std::uint32_t lane = 0; lane < area->lanes(); ++lane) {
    static_cast<void>(area->InFlight(lane).has_value());
  }
  area->Abandon();
  const auto after = area->Recover(resolve);
  Require(after.ok() && after->empty());
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const zeroshard::Input words(data + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      zeroshard::ReadCompletionPage(words);
      break;
    case 1:
      zeroshard::ReadBoard(words);
      break;
    case 2:
      zeroshard::ReadUserStates(words);
      break;
    default:
      zeroshard::RecoverUndoArea(words);
      break;
  }
  return 0;
}
