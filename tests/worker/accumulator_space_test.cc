// One pass over a unit's gradients gives the sum and its squares: the same bits as sums and squares
// taken one after the other, with absent parameters, on any number of lanes, and when a process was
// killed in the middle of it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/layout_proto.h"
#include "storage/partition.h"
#include "tests/worker/random_values.h"
#include "worker/shard.h"

namespace zeroshard {
namespace {

constexpr uint32_t kRanks = 3;
constexpr uint64_t kPage = 4096;

struct Setting {
  uint32_t stage = 3;
  uint32_t workers = 2;
  uint32_t worker = 1;
  int lanes = 2;
  DType accumulator = DType::kFloat32;
  uint64_t sub_group = 0;
};

std::string Describe(const Setting& s) {
  return absl::StrCat("stage ", s.stage, " W ", s.workers, " worker ", s.worker, " lanes ", s.lanes,
                      " accumulator ", static_cast<int>(s.accumulator), " sub-group ", s.sub_group);
}

// Shared memory that starts on a page and is zero.
class Memory {
 public:
  explicit Memory(uint64_t bytes)
      : bytes_((bytes + kPage - 1) / kPage * kPage),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_;
  void* data_;
};

// One worker's accumulators, and the gradients of three ranks for them.
class World {
 public:
  World(const Setting& setting, std::mt19937_64& random) : setting_(setting), random_(random) {
    // One large parameter beside small ones, odd ends, an empty one.
    for (uint64_t size : {5, 7, 0, 513, 150001, 100, 16, 300, 3}) {
      model::v1::Parameter& parameter = *manifest_.add_parameters();
      parameter.set_name(absl::StrCat("p", manifest_.parameters_size()));
      parameter.set_module("m");
      parameter.add_shape(size);
      parameter.set_dtype(model::v1::DTYPE_BFLOAT16);
      parameter.set_trainable(true);
    }
    manifest_.add_groups();
    layout_ = std::make_unique<Layout>(*LayoutFromProto(manifest_, setting.workers));
    model::v1::EngineConfig config;
    config.set_stage(setting.stage);
    config.set_accumulator_dtype(ToProto(setting.accumulator));
    config.set_sub_group_elements(setting.sub_group);
    plan_ = std::make_unique<PartitionPlan>(*PartitionPlan::Create(
        *layout_, config, setting.worker, static_cast<uint32_t>(setting.lanes)));
    tree_ = ReductionTree::Create(kRanks, 2)->RankPlan();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      gradients_.push_back(std::make_unique<Memory>(unit().elements() * sizeof(float)));
    }
    NewGradients();
  }

  const Unit& unit() const { return layout_->units()[0]; }
  const PartitionPlan& plan() const { return *plan_; }
  Memory& gradient(uint32_t rank) { return *gradients_[rank]; }

  std::unique_ptr<Memory> NewPartition() const {
    auto memory = std::make_unique<Memory>(plan_->bytes());
    EXPECT_TRUE(UndoArea::Format(memory->data() + plan_->undo_offset(), plan_->undo_bytes(),
                                 static_cast<uint32_t>(setting_.lanes),
                                 static_cast<uint32_t>(plan_->chunks().size()))
                    .ok());
    return memory;
  }
  AccumulatorSpace Open(const Memory& partition) const {
    return *AccumulatorSpace::Open(*layout_, *plan_, partition.data(), setting_.accumulator);
  }

  // Other gradients of other types; a third of the parameters get none of a rank.
  void NewGradients() {
    inputs_.clear();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      GradientInput input;
      input.dtype = kAllDTypes[random_() % 3];
      const auto bytes =
          Encode(input.dtype, RandomFloats(random_, unit().elements(), Values::kOrdinary));
      std::memcpy(gradients_[rank]->data(), bytes.data(), bytes.size());
      if (random_() % 5 != 0) input.data = gradients_[rank]->data();
      if (random_() % 2 == 0) input.weight = 0.75f;
      for (uint32_t p = 0; p < unit().parameters.size(); ++p) {
        if (random_() % 3 != 0) input.present[0] |= uint64_t{1} << p;
      }
      inputs_.push_back(input);
    }
  }

  AccumulateJob Job(Tag tag, const Presence& before) const {
    return {.unit = 0,
            .tag = tag,
            .plan = &tree_,
            .inputs = inputs_,
            .before = before,
            .squared = plan_->unit(0).shard};
  }

  // The sum, parameter by parameter, in a pass of its own.
  void SumApart(const AccumulateJob& job, std::byte* element0) const {
    for (uint32_t position = 0; position < unit().parameters.size(); ++position) {
      const ParameterPlace& place = layout_->place(unit().parameters[position]);
      const GrainRange slice = plan_->unit(0).slice;
      const uint64_t begin = std::max(place.offset, slice.first_element());
      const uint64_t end = std::min(place.offset + place.elements, slice.end * kGrainElements);
      if (begin >= end) continue;
      bool present[kRanks];
      std::vector<ReduceSource> sources;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const GradientInput& input = job.inputs[rank];
        present[rank] = input.data != nullptr && IsPresent(input.present, position);
        sources.push_back({input.data, input.dtype, input.weight != 1.0f, input.weight});
      }
      const AccumulateMode mode =
          IsPresent(job.before, position) ? AccumulateMode::kAdd : AccumulateMode::kStore;
      Reduce(tree_.Program(present), sources, {element0, setting_.accumulator, mode}, begin, end);
    }
  }

  // The squares, in a pass of their own.
  ExactSum SquareApart(const Presence& present, const std::byte* element0) const {
    const GrainRange shard = plan_->unit(0).shard;
    ExactSum sum;
    AddSquares(
        {element0, setting_.accumulator, unit().elements()},
        PresentRanges(*layout_, 0, present, shard.first_element(), shard.end * kGrainElements),
        shard.begin, shard.end, sum);
    sum.Normalize();
    return sum;
  }

  void ExpectSame(const Accumulated& got, const AccumulatorSpace& space, const Presence& present,
                  const std::byte* expected) const {
    ASSERT_EQ(got.present, present);
    const GrainRange slice = plan_->unit(0).slice;
    for (const ElementRange& range :
         PresentRanges(*layout_, 0, present, slice.first_element(), slice.end * kGrainElements)) {
      const uint64_t at = range.begin * SizeOf(setting_.accumulator);
      ASSERT_EQ(std::memcmp(space.data(0) + at, expected + at,
                            range.end * SizeOf(setting_.accumulator) - at),
                0);
    }
    const ExactSum squares = SquareApart(present, expected);
    ASSERT_EQ(std::memcmp(&got.squares, &squares, sizeof(squares)), 0)
        << got.squares.ToDouble() << " and " << squares.ToDouble();
  }

 private:
  static model::v1::DType ToProto(DType dtype) {
    return dtype == DType::kFloat32    ? model::v1::DTYPE_FLOAT32
           : dtype == DType::kBfloat16 ? model::v1::DTYPE_BFLOAT16
                                       : model::v1::DTYPE_FLOAT16;
  }

  Setting setting_;
  std::mt19937_64& random_;
  model::v1::Manifest manifest_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<PartitionPlan> plan_;
  ReductionPlan tree_;
  std::vector<std::unique_ptr<Memory>> gradients_;
  std::vector<GradientInput> inputs_;
};

std::vector<Setting> Settings() {
  return {{},
          {.worker = 0, .lanes = 3},
          {.workers = 1, .worker = 0, .lanes = 1},
          {.accumulator = DType::kBfloat16},
          {.worker = 0, .accumulator = DType::kFloat16},
          {.stage = 0, .workers = 3},
          {.workers = 7, .worker = 3, .sub_group = 700},
          {.workers = 1, .worker = 0, .lanes = 3, .sub_group = 1}};
}

TEST(AccumulatorSpaceTest, OnePassGivesTheBitsOfTwo) {
  std::mt19937_64 random(11);
  for (const Setting& setting : Settings()) {
    SCOPED_TRACE(Describe(setting));
    World world(setting, random);
    const auto pool = *ThreadPool::Create({.threads = setting.lanes});
    const auto partition = world.NewPartition();
    const AccumulatorSpace space = world.Open(*partition);
    const Memory apart(world.unit().elements() * sizeof(float));
    for (uint64_t attempt = 1; attempt <= 4; ++attempt) {
      Presence present = {};
      for (uint32_t micro_step = 0; micro_step < 4; ++micro_step) {
        world.NewGradients();
        const AccumulateJob job = world.Job(MakeTag(attempt, micro_step), present);
        world.SumApart(job, apart.data());
        const Accumulated got = space.Accumulate(job, *pool);
        present = got.present;
        world.ExpectSame(got, space, present, apart.data());
        if (HasFatalFailure()) return;
      }
    }
  }
}

// What a process does until it is killed: gradients from some page on cannot be read.
[[noreturn]] void DieInTheMiddle(World& world, const Memory& partition, const AccumulateJob& job,
                                 int lanes, uint64_t page) {
  // The default action: no report of a sanitizer.
  signal(SIGSEGV, SIG_DFL);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Memory& gradient = world.gradient(rank);
    mprotect(gradient.data() + page * kPage, gradient.bytes() - page * kPage, PROT_NONE);
  }
  const auto pool = *ThreadPool::Create({.threads = lanes});
  world.Open(partition).Accumulate(job, *pool);
  _exit(0);  // the rest of the slice lies before that page
}

TEST(AccumulatorSpaceTest, APassThatAKilledProcessBeganHasTheSameSquares) {
  std::mt19937_64 random(12);
  int killed = 0;
  for (const Setting& setting : Settings()) {
    SCOPED_TRACE(Describe(setting));
    for (int round = 0; round < 4; ++round) {
      World world(setting, random);
      const auto partition = world.NewPartition();
      const Memory apart(world.unit().elements() * sizeof(float));
      const AccumulateJob first = world.Job(MakeTag(1, 0), {});
      world.SumApart(first, apart.data());
      Presence present;
      {
        const auto pool = *ThreadPool::Create({.threads = setting.lanes});
        present = world.Open(*partition).Accumulate(first, *pool).present;
      }
      world.NewGradients();
      const AccumulateJob second = world.Job(MakeTag(1, 1), present);
      world.SumApart(second, apart.data());
      const uint64_t page = random() % (world.gradient(0).bytes() / kPage);
      const pid_t child = fork();
      if (child == 0) DieInTheMiddle(world, *partition, second, setting.lanes, page);
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      killed += WIFSIGNALED(status) ? 1 : 0;

      const AccumulatorSpace space = world.Open(*partition);
      ASSERT_TRUE(space.undo()
                      .Recover([&](const UndoKey&, uint32_t chunk) -> absl::StatusOr<UndoChunk> {
                        return space.UndoOf(chunk);
                      })
                      .ok());
      const auto pool = *ThreadPool::Create({.threads = setting.lanes});
      const Accumulated got = space.Accumulate(second, *pool);
      world.ExpectSame(got, space, got.present, apart.data());
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(killed, 10);
}

}  // namespace
}  // namespace zeroshard
