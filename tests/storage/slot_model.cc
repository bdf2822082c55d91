#include "tests/storage/slot_model.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr uint64_t kSector = 512;
constexpr uint64_t kJob = 77;
constexpr uint64_t kLayout = 88;

std::span<uint64_t> Aligned(std::vector<uint64_t>& storage) {
  const auto address = reinterpret_cast<uintptr_t>(storage.data());
  const size_t skip = (64 - address % 64) % 64 / sizeof(uint64_t);
  return std::span(storage).subspan(skip, storage.size() - 8);
}

std::vector<std::byte> Payload(uint32_t chunk, const ModelState& state) {
  std::vector<std::byte> payload(4096, std::byte{0xaa});
  const uint64_t value = 1000003 * state.step + 7919 * state.salt + chunk;
  std::memcpy(payload.data(), &value, sizeof(value));
  std::fill_n(payload.begin() + kSector, kSector, std::byte(state.step % 2));
  return payload;
}

}  // namespace

void ModelDisk::Land(const ModelWrite& write, uint32_t units) {
  const auto sectors = [&](uint64_t begin, uint64_t end) {
    std::memcpy(slot(write.slot).data() + begin, write.image.data() + begin, end - begin);
  };
  if ((units & 1) != 0) sectors(0, 4096);
  if ((units & 2) != 0) sectors(4096, 4096 + kSector);
  if ((units & 4) != 0) sectors(4096 + kSector, kModelImageBytes);
}

ModelWorld::ModelWorld(uint32_t spares)
    : spares(spares),
      memory_storage(SlotTable::Bytes(kModelChunks, slots()) / 8 + 8),
      memory(Aligned(memory_storage)),
      disk(slots()) {}

ModelWorld::ModelWorld(const ModelWorld& other) : ModelWorld(other.spares) {
  std::copy(other.memory.begin(), other.memory.end(), memory.begin());
  disk = other.disk;
  board_attempt = other.board_attempt;
  committed = other.committed;
}

SlotTableShape ModelWorld::shape() const {
  return {kModelChunks, slots(), kJob, kLayout, /*plan_fingerprint=*/5};
}

ImageIdentity ModelIdentity(uint32_t chunk, const SlotImage& image) {
  return {.job_id = kJob,
          .layout_fingerprint = kLayout,
          .worker = 0,
          .unit = 1,
          .first_grain = 4 * chunk,
          .grains = 4,
          .chunk = chunk,
          .path = 0,
          .offset = image.slot * kModelImageBytes,
          .generation = image.generation,
          .attempt = image.attempt,
          .step = image.step};
}

const ChunkShape& ModelShape() {
  static const ChunkShape* const kShape = new ChunkShape(
      *ChunkShape::Create(std::vector<ChunkArray>{{ChunkArrayKind::kMaster, 4, 4096}}));
  return *kShape;
}

std::vector<std::byte> ModelImage(uint32_t chunk, SlotImage& image, uint64_t salt) {
  std::vector<std::byte> bytes(kModelImageBytes);
  const std::vector<std::byte> payload = Payload(chunk, {image.step, salt});
  std::copy(payload.begin(), payload.end(), bytes.begin() + 4096);
  image.checksum = EncodeChunkImage(bytes, ModelShape(), ModelIdentity(chunk, image));
  return bytes;
}

std::string CheckModelImage(ModelDisk& disk, uint32_t chunk, const SlotImage& image,
                            const ModelState& state) {
  const std::span<std::byte> bytes = disk.slot(image.slot);
  const absl::Status status =
      VerifyChunkImage(bytes, ModelShape(), {ModelIdentity(chunk, image), image.checksum}, "disk");
  if (!status.ok()) return std::string(status.message());
  const std::vector<std::byte> payload = Payload(chunk, state);
  if (image.step != state.step || !std::equal(payload.begin(), payload.end(), &bytes[4096])) {
    return absl::StrCat("chunk ", chunk, " has step ", image.step, ", or another one's bytes");
  }
  return {};
}

std::string RunModelAttempt(ModelWorld& world, SlotTable& table, uint64_t attempt, uint64_t salt,
                            const ModelTick& tick) {
  const ModelState next{world.committed.step + 1, salt};
  if (absl::Status begun = table.Begin(attempt); !begun.ok()) return begun.ToString();
  std::vector<std::pair<uint32_t, SlotImage>> submitted;
  for (uint32_t chunk = 0; chunk < kModelChunks; ++chunk) {
    if (table.Prepared(chunk).has_value()) continue;
    tick();
    const auto current = table.Current(chunk);
    if (!current.has_value()) return absl::StrCat("chunk ", chunk, " has no image");
    if (std::string bad = CheckModelImage(world.disk, chunk, *current, world.committed);
        !bad.empty()) {
      return absl::StrCat("reading: ", bad);
    }
    auto slot = table.Reserve(chunk);
    if (!slot.ok()) return slot.status().ToString();
    SlotImage image{*slot, table.generation(), attempt, next.step, 0};
    tick();
    world.disk.in_flight.push_back({*slot, ModelImage(chunk, image, salt)});
    submitted.push_back({chunk, image});
  }
  for (; !submitted.empty(); submitted.pop_back()) {
    tick();
    const auto& [chunk, image] = submitted.back();
    auto& writes = world.disk.in_flight;
    const auto mine = std::find_if(writes.rbegin(), writes.rend(),
                                   [&](const ModelWrite& w) { return w.slot == image.slot; });
    world.disk.Land(*mine, kAllModelUnits);
    writes.erase(std::next(mine).base());
    tick();
    if (absl::Status done = table.Complete(chunk, image); !done.ok()) return done.ToString();
  }
  tick();
  world.board_attempt = attempt;
  world.committed = next;
  tick();
  if (absl::Status done = table.Commit(attempt); !done.ok()) return done.ToString();
  for (uint32_t chunk = 0; chunk < kModelChunks; ++chunk) {
    if (std::string bad =
            CheckModelImage(world.disk, chunk, *table.Current(chunk), world.committed);
        !bad.empty()) {
      return absl::StrCat("after the commit: ", bad);
    }
  }
  return {};
}

std::string FormatModel(ModelWorld& world) {
  auto table = SlotTable::Format(world.region(), world.shape(), 1, 0);
  if (!table.ok()) return table.status().ToString();
  if (absl::Status begun = table->Begin(0); !begun.ok()) return begun.ToString();
  for (uint32_t chunk = 0; chunk < kModelChunks; ++chunk) {
    auto slot = table->Reserve(chunk);
    if (!slot.ok()) return slot.status().ToString();
    SlotImage image{*slot, 1, 0, 0, 0};
    world.disk.Land({*slot, ModelImage(chunk, image, 0)}, kAllModelUnits);
    if (absl::Status done = table->Complete(chunk, image); !done.ok()) return done.ToString();
  }
  return {};
}

}  // namespace zeroshard
