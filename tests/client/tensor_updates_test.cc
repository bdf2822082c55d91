// The parallel pass over separate tensors against the kernel on each of them alone.
#include "client/python/tensor_updates.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

namespace zeroshard {
namespace {

// Tensors of the given sizes under AdamW with 8-bit states, so that a wrong cut shows.
class Tensors {
 public:
  explicit Tensors(const std::vector<uint64_t>& sizes) : tensors_(sizes.size()) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < sizes.size(); ++i) {
      Tensor& tensor = tensors_[i];
      tensor.param.resize(sizes[i]);
      tensor.grad.resize(sizes[i]);
      for (float& value : tensor.param) value = normal(random);
      for (float& value : tensor.grad) value = normal(random);
      TensorUpdate& update = tensor.update;
      update.arrays.grad = tensor.grad.data();
      update.arrays.param = tensor.param.data();
      update.arrays.state_format = StateFormat::kInt8;
      for (int slot = 0; slot < 2; ++slot) {
        tensor.codes[slot].resize(sizes[i]);
        tensor.absmax[slot].resize(sizes[i] / kStateBlock + 1);
        update.arrays.state[slot] = tensor.codes[slot].data();
        update.arrays.absmax[slot] = tensor.absmax[slot].data();
      }
      update.elements = sizes[i];
      update.args = i % 2;
      updates_.push_back(&update);
    }
  }

  void UpdateTogether(int lanes, int steps) {
    auto pool = ThreadPool::Create({.threads = lanes});
    ASSERT_TRUE(pool.ok()) << pool.status();
    for (int step = 1; step <= steps; ++step) ApplyTensorUpdates(updates_, ArgsOf(step), **pool);
  }

  void UpdateOneByOne(int steps) {
    for (int step = 1; step <= steps; ++step) {
      const std::vector<UpdateArgs> args = ArgsOf(step);
      for (const TensorUpdate* update : updates_) {
        const UpdateSegment all = {.begin = 0, .end = update->elements, .args = update->args};
        const UpdatePass pass = {.kind = update->kind,
                                 .arrays = update->arrays,
                                 .segments = absl::MakeConstSpan(&all, 1),
                                 .args = args};
        ApplyUpdate(pass, 0, update->elements);
      }
    }
  }

  friend bool operator==(const Tensors& a, const Tensors& b) {
    for (size_t i = 0; i < a.tensors_.size(); ++i) {
      const Tensor& x = a.tensors_[i];
      const Tensor& y = b.tensors_[i];
      if (x.param != y.param || x.codes[0] != y.codes[0] || x.codes[1] != y.codes[1]) return false;
      if (x.absmax[0] != y.absmax[0] || x.absmax[1] != y.absmax[1]) return false;
    }
    return a.tensors_.size() == b.tensors_.size();
  }

 private:
  struct Tensor {
    std::vector<float> param;
    std::vector<float> grad;
    std::vector<uint8_t> codes[2];
    std::vector<float> absmax[2];
    TensorUpdate update;
  };

  static std::vector<UpdateArgs> ArgsOf(int step) {
    return {MakeUpdateArgs({.lr = 1e-2}, step),
            MakeUpdateArgs({.lr = 1e-3, .weight_decay = 0.1}, step)};
  }

  std::vector<Tensor> tensors_;
  std::vector<const TensorUpdate*> updates_;
};

void ExpectSame(const std::vector<uint64_t>& sizes) {
  Tensors expected(sizes);
  expected.UpdateOneByOne(3);
  for (int lanes : {1, 2, 3, 8}) {
    Tensors found(sizes);
    found.UpdateTogether(lanes, 3);
    EXPECT_TRUE(found == expected) << lanes << " lanes";
  }
}

TEST(TensorUpdates, NoTensors) { ExpectSame({}); }

TEST(TensorUpdates, OneTensorIsCutWhereBlocksEnd) { ExpectSame({200'003}); }

TEST(TensorUpdates, ManySmallTensorsAndEmptyOnes) {
  std::vector<uint64_t> sizes(3000, 10);
  for (size_t i = 0; i < sizes.size(); i += 7) sizes[i] = i % 5 * 100;
  ExpectSame(sizes);
}

TEST(TensorUpdates, SizesOfEveryKindInAnyOrder) {
  std::mt19937 random(3);
  for (int round = 0; round < 5; ++round) {
    std::vector<uint64_t> sizes;
    for (int i = 0; i < 40; ++i) sizes.push_back(random() % (uint64_t{1} << (random() % 17 + 1)));
    ExpectSame(sizes);
  }
}

}  // namespace
}  // namespace zeroshard
