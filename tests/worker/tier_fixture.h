// A worker's NVMe tier with states of a small job in it, and a model of what they must be.
#ifndef ZEROSHARD_TESTS_WORKER_TIER_FIXTURE_H_
#define ZEROSHARD_TESTS_WORKER_TIER_FIXTURE_H_

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/cpu/thread_pool.h"
#include "storage/io_backend.h"
#include "storage/layout.h"
#include "storage/nvme_plan.h"
#include "storage/partition.h"
#include "tests/storage/nvme_fixture.h"
#include "worker/nvme_tier.h"

namespace zeroshard {

// io_uring may be denied.
inline bool IsToBeHad(IoBackend backend) { return MakeIoQueue(backend, {}).ok(); }

struct TierJobShape {
  std::vector<uint64_t> elements = {1000, 5000, 300, 257};  // of each unit
  uint32_t paths = 1;
  bool parameters = true;  // on the tier, too
  uint64_t chunk_elements = 2048;
  uint32_t spares = 2;
  std::string parent = std::filesystem::temp_directory_path().string();  // of the paths
};

// The plan of a job's only worker.
class TierJobPlan {
 public:
  explicit TierJobPlan(const TierJobShape& shape) : layout_(MakeLayout(shape)) {
    model::v1::EngineConfig config;
    config.set_stage(3);
    config.set_tiered(true);
    config.set_optimizer_tier(model::v1::TIER_NVME);
    config.set_optimizer_ratio(1);
    config.set_parameter_tier(shape.parameters ? model::v1::TIER_NVME : model::v1::TIER_HOST);
    config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
    config.set_window(model::v1::WINDOW_COPY);
    config.set_sub_group_elements(shape.chunk_elements);
    config.add_state_slots("exp_avg");
    config.add_state_slots("exp_avg_sq");
    config.mutable_nvme()->set_spares(shape.spares);
    auto partition = PartitionPlan::Create(layout_, config, 0, 1);
    EXPECT_TRUE(partition.ok()) << partition.status();
    const std::vector<uint64_t> weights(shape.paths, 1);
    auto plan = NvmePlan::Create(layout_, *partition, config, weights);
    EXPECT_TRUE(plan.ok()) << plan.status();
    plan_.emplace(*std::move(plan));
  }

  const NvmePlan& operator*() const { return *plan_; }
  const NvmePlan* operator->() const { return &*plan_; }

 private:
  static Layout MakeLayout(const TierJobShape& shape) {
    std::vector<ParameterSpec> parameters;
    for (size_t i = 0; i < shape.elements.size(); ++i) {
      const std::string name = "p" + std::to_string(i);
      parameters.push_back({.name = name,
                            .shape = {shape.elements[i]},
                            .dtype = DType::kBfloat16,
                            .module = "m" + name});
    }
    return *Layout::Create(std::move(parameters), 1);
  }

  Layout layout_;
  std::optional<NvmePlan> plan_;
};

using ImageArrays = std::vector<std::string>;

// What the work of a step does; its result depends on all that was read.
inline void Advance(char* bytes, size_t count, uint64_t step) {
  for (size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<char>(static_cast<uint8_t>(bytes[i]) * 5 + 1 + step);
  }
}

class TierJob {
 public:
  explicit TierJob(const TierJobShape& shape = {}) : plan_(shape) {
    // Shared with children, as the server's regions are with its workers.
    void* memory = ::mmap(nullptr, plan_->table_bytes(), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    table_ = {static_cast<std::byte*>(memory), plan_->table_bytes()};
    for (uint32_t p = 0; p < shape.paths; ++p) {
      directories_.push_back(std::make_unique<DiskDir>(shape.parent));
      options_.paths.push_back({directories_.back()->path()});
    }
    options_.job = "test";
    options_.one_lane_bytes = 0;  // images are small here, and lanes have their part all the same
    options_.job_id = 0x4d2;
    options_.layout_fingerprint = 7;
    options_.config.set_block_bytes(8192);
    options_.config.set_queue_depth(4);
    options_.config.set_threads(2);
    options_.config.set_single_submit(false);
    options_.config.set_overlap_events(true);
    options_.config.set_buffer_count(2);
    options_.config.set_pipeline_read(true);
    options_.config.set_pipeline_write(true);
    options_.config.set_spares(shape.spares);
    options_.table = table_;
  }
  TierJob(const TierJob&) = delete;
  TierJob& operator=(const TierJob&) = delete;
  ~TierJob() {
    tier_.reset();
    ::munmap(table_.data(), table_.size());
  }

  // Before Open; 0: no pool.
  void UsePool(int lanes) { lanes_ = lanes; }
  NvmeTierOptions& options() { return options_; }
  const NvmePlan& plan() const { return *plan_; }
  const DiskDir& directory(uint32_t path) const { return *directories_[path]; }
  NvmeTier& tier() { return *tier_; }

  absl::Status Open(bool recover = false, uint64_t committed = 0) {
    tier_.reset();
    if (pool_ == nullptr && lanes_ > 0) pool_ = *ThreadPool::Create({.threads = lanes_});
    options_.pool = pool_.get();
    options_.recover = recover;
    options_.committed = committed;
    auto tier = NvmeTier::Open(*plan_, options_);
    if (tier.ok()) tier_ = *std::move(tier);
    return tier.status();
  }
  void Close() { tier_.reset(); }

  std::vector<uint32_t> Images() const {
    std::vector<uint32_t> images;
    for (uint32_t i = 0; i < plan_->images().size(); ++i) {
      if (plan_->images()[i].elements > 0) images.push_back(i);
    }
    return images;
  }

  // Initial contents of all images, in the committed attempt.
  absl::Status Fill(uint64_t attempt = 0) {
    FillModel();
    std::vector<TierItem> items;
    for (const uint32_t image : Images()) items.push_back({.write = image});
    absl::Status status = tier_->Begin(attempt, attempt);
    if (!status.ok()) return status;
    return tier_->Run(items, [this](const TierItem& item, const TierBuffers& buffers) {
      Store(item.write, model_.at(item.write), buffers.write);
      return absl::OkStatus();
    });
  }
  void FillModel() {
    for (const uint32_t image : Images()) {
      ImageArrays arrays;
      for (const ChunkArray& array : plan_->shape(image).arrays()) {
        std::string text(array.bytes, '\0');
        for (size_t i = 0; i < text.size(); ++i) {
          text[i] = static_cast<char>(image * 31 + arrays.size() * 7 + i * i);
        }
        arrays.push_back(std::move(text));
      }
      model_[image] = std::move(arrays);
    }
  }

  // The items of a step: states are rewritten, parameters that belong to them are written.
  std::vector<TierItem> StepItems() const {
    std::vector<TierItem> items;
    for (const uint32_t image : Images()) {
      if (plan_->images()[image].parameters) continue;
      items.push_back({.read = image, .rewrite = true, .write = plan_->parameter_image_of(image)});
    }
    return items;
  }

  // A step's pass, without its commit.
  absl::Status Step(uint64_t attempt) {
    absl::Status status = tier_->Begin(attempt, attempt);
    if (!status.ok()) return status;
    return RunStep(StepItems(), attempt);
  }

  absl::Status RunStep(const std::vector<TierItem>& items, uint64_t attempt,
                       TierFeed* feed = nullptr) {
    const auto work = [&](const TierItem& item, const TierBuffers& buffers) {
      const ChunkShape& shape = plan_->shape(item.read);
      for (size_t i = 0; i < shape.arrays().size(); ++i) {
        Advance(reinterpret_cast<char*>(buffers.read) + shape.offset(i), shape.arrays()[i].bytes,
                attempt);
      }
      if (item.write == kNoImage) return absl::OkStatus();
      const ChunkShape& parameters = plan_->shape(item.write);
      const auto* state = buffers.read + shape.offset(0);
      auto* out = buffers.write + parameters.offset(0);
      for (size_t i = 0; i < parameters.arrays()[0].bytes; ++i) out[i] = state[2 * i];
      return absl::OkStatus();
    };
    return tier_->Run(items, work, feed);
  }

  // Does the step in the model.
  void Expect(uint64_t attempt) {
    for (const TierItem& item : StepItems()) {
      ImageArrays& arrays = model_.at(item.read);
      for (std::string& array : arrays) Advance(array.data(), array.size(), attempt);
      if (item.write == kNoImage) continue;
      std::string& out = model_.at(item.write)[0];
      for (size_t i = 0; i < out.size(); ++i) out[i] = arrays[0][2 * i];
    }
  }

  absl::Status StepAndCommit(uint64_t attempt) {
    absl::Status status = Step(attempt);
    if (status.ok()) status = tier_->Seal("extra");
    if (status.ok()) status = tier_->Commit(attempt);
    if (status.ok()) Expect(attempt);
    return status;
  }

  // Reads all images and compares them to the model; an error of the tier is returned.
  absl::Status Check() {
    std::vector<TierItem> items;
    for (const uint32_t image : Images()) items.push_back({.read = image});
    std::mutex mutex;
    return tier_->Run(items, [&](const TierItem& item, const TierBuffers& buffers) {
      const ImageArrays found = Load(item.read, buffers.read);
      const std::lock_guard<std::mutex> lock(mutex);
      EXPECT_TRUE(found == model_.at(item.read)) << "image " << item.read << " differs";
      return absl::OkStatus();
    });
  }

  std::map<uint32_t, ImageArrays>& model() { return model_; }
  std::span<std::byte> table() const { return table_; }

 private:
  ImageArrays Load(uint32_t image, const std::byte* bytes) const {
    ImageArrays arrays;
    const ChunkShape& shape = plan_->shape(image);
    for (size_t i = 0; i < shape.arrays().size(); ++i) {
      const char* begin = reinterpret_cast<const char*>(bytes) + shape.offset(i);
      arrays.emplace_back(begin, begin + shape.arrays()[i].bytes);
    }
    return arrays;
  }
  void Store(uint32_t image, const ImageArrays& arrays, std::byte* bytes) const {
    for (size_t i = 0; i < arrays.size(); ++i) {
      std::memcpy(bytes + plan_->shape(image).offset(i), arrays[i].data(), arrays[i].size());
    }
  }

  TierJobPlan plan_;
  std::vector<std::unique_ptr<DiskDir>> directories_;
  std::span<std::byte> table_;
  int lanes_ = 2;
  std::unique_ptr<ThreadPool> pool_;
  NvmeTierOptions options_;
  std::map<uint32_t, ImageArrays> model_;
  std::unique_ptr<NvmeTier> tier_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_TIER_FIXTURE_H_
