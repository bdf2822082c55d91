#include "client/python/tensor_updates.h"

#include <algorithm>
#include <vector>

namespace zeroshard {
namespace {

// What a tensor costs beside its elements, in elements.
constexpr uint64_t kTensorCost = 128;
// Where a tensor may be cut: whole blocks of 8-bit states, whole grains of random numbers.
constexpr uint64_t kCutElements = 1024;
static_assert(kCutElements % kStateBlock == 0);
// Less than this is not worth waking a thread.
constexpr uint64_t kLaneCost = 1 << 14;

// The line of all tensors' costs; a position on it is a place inside a tensor.
class CostLine {
 public:
  explicit CostLine(absl::Span<const TensorUpdate* const> updates) : ends_(updates.size()) {
    uint64_t end = 0;
    for (size_t i = 0; i < updates.size(); ++i) {
      end += updates[i]->elements + kTensorCost;
      ends_[i] = end;
    }
  }

  uint64_t total() const { return ends_.empty() ? 0 : ends_.back(); }

  size_t TensorAt(uint64_t position) const {
    return std::upper_bound(ends_.begin(), ends_.end(), position) - ends_.begin();
  }

  // The first element of `tensor` that lies behind `position`.
  uint64_t CutOf(size_t tensor, uint64_t position, uint64_t elements) const {
    const uint64_t begin = ends_[tensor] - elements - kTensorCost;
    if (position <= begin) return 0;
    const uint64_t inside = position - begin;
    return inside >= elements ? elements : inside / kCutElements * kCutElements;
  }

 private:
  std::vector<uint64_t> ends_;
};

void ApplyPart(const TensorUpdate& update, absl::Span<const UpdateArgs> args, uint64_t begin,
               uint64_t end) {
  const UpdateSegment all = {.begin = 0, .end = update.elements, .args = update.args};
  const UpdatePass pass = {.kind = update.kind,
                           .arrays = update.arrays,
                           .segments = absl::MakeConstSpan(&all, 1),
                           .args = args,
                           .random_key = update.random_key};
  ApplyUpdate(pass, begin, end);
}

}  // namespace

void ApplyTensorUpdates(absl::Span<const TensorUpdate* const> updates,
                        absl::Span<const UpdateArgs> args, ThreadPool& pool) {
  const CostLine line(updates);
  const uint64_t useful = std::max<uint64_t>(1, line.total() / kLaneCost);
  const int lanes = static_cast<int>(std::min<uint64_t>(pool.lanes(), useful));
  pool.ParallelFor(lanes, [&](size_t item, int) {
    const ItemRange part = ItemsOfLane(line.total(), static_cast<int>(item), lanes);
    const size_t behind = std::min(line.TensorAt(part.end) + 1, updates.size());
    for (size_t i = line.TensorAt(part.begin); i < behind; ++i) {
      const uint64_t begin = line.CutOf(i, part.begin, updates[i]->elements);
      const uint64_t end = line.CutOf(i, part.end, updates[i]->elements);
      if (begin < end) ApplyPart(*updates[i], args, begin, end);
    }
  });
}

}  // namespace zeroshard
