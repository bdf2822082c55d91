#include "tests/bench/nvme_bed.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <deque>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/extent_plan.h"
#include "storage/file_io.h"
#include "storage/file_system_kind.h"
#include "storage/io_backend.h"
#include "storage/nvme_path.h"
#include "storage/partition.h"

namespace zeroshard::bench {
namespace {

constexpr uint64_t kFillBytes = uint64_t{4} << 20;

void MustBeOk(const absl::Status& status) { ZS_CHECK(status.ok(), Std(status.message())); }

template <typename T>
T Must(absl::StatusOr<T> value) {
  MustBeOk(value.status());
  return *std::move(value);
}

Layout OneUnit(uint64_t elements) {
  std::vector<ParameterSpec> parameters;
  parameters.push_back(
      {.name = "weight", .shape = {elements}, .dtype = DType::kBfloat16, .module = "m"});
  return Must(Layout::Create(std::move(parameters), 1));
}

model::v1::EngineConfig ConfigOf(const NvmeBedShape& shape) {
  model::v1::EngineConfig config;
  config.set_stage(3);
  config.set_tiered(!shape.parameters);
  config.set_optimizer_tier(shape.parameters ? model::v1::TIER_HOST : model::v1::TIER_NVME);
  config.set_optimizer_ratio(1);
  config.set_parameter_tier(shape.parameters ? model::v1::TIER_NVME : model::v1::TIER_HOST);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
  config.set_window(model::v1::WINDOW_COPY);
  config.set_sub_group_elements(kBedChunk);
  config.add_state_slots("exp_avg");
  config.add_state_slots("exp_avg_sq");
  model::v1::NvmeConfig& nvme = *config.mutable_nvme();
  nvme.set_block_bytes(uint64_t{1} << 20);
  nvme.set_queue_depth(8);
  nvme.set_threads(1);
  nvme.set_overlap_events(true);
  nvme.set_buffer_count(shape.parameters ? 5 : 4);
  nvme.set_pipeline_read(true);
  nvme.set_pipeline_write(true);
  nvme.set_spares(2);
  return config;
}

}  // namespace

double ProcessCpuSeconds() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

absl::StatusOr<std::unique_ptr<DriveDirectory>> DriveDirectory::Make() {
  const char* given = std::getenv("ZEROSHARD_BENCH_NVME_DIR");
  const std::string parent = given == nullptr || *given == '\0'
                                 ? std::filesystem::current_path().string()
                                 : std::filesystem::absolute(given).string();
  ZS_ASSIGN_OR_RETURN(const FileSystemKind kind, FileSystemKindAt(parent));
  constexpr char kAdvice[] = "; set ZEROSHARD_BENCH_NVME_DIR to a directory on a local drive";
  if (kind.place != FileSystemPlace::kLocal) {
    return absl::FailedPreconditionError(absl::StrCat(parent, " is on ", kind.name, kAdvice));
  }
  std::string path = parent + "/.bench-nvme-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) return ErrnoError(errno, "make a directory in", parent);
  std::unique_ptr<DriveDirectory> directory(new DriveDirectory(path));
  ZS_ASSIGN_OR_RETURN(const NvmePath admitted, AdmitNvmePath(path, {}));
  if (!admitted.direct) {
    return absl::FailedPreconditionError(absl::StrCat(parent, " does not take O_DIRECT", kAdvice));
  }
  return directory;
}

DriveDirectory::~DriveDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

NvmeBed::NvmeBed(const DriveDirectory& directory, const NvmeBedShape& shape)
    : shape_(shape),
      layout_(OneUnit(shape.elements)),
      pool_(Must(ThreadPool::Create({.threads = shape.lanes}))) {
  const model::v1::EngineConfig config = ConfigOf(shape);
  const PartitionPlan partition =
      Must(PartitionPlan::Create(*layout_, config, 0, static_cast<uint32_t>(shape.lanes)));
  constexpr uint64_t kWeights[] = {1};
  plan_.emplace(Must(NvmePlan::Create(*layout_, partition, config, kWeights)));
  images_ = static_cast<uint32_t>(shape.elements / kBedChunk);
  first_ = shape.parameters ? plan_->parameter_images(0).first : 0;
  table_.emplace(Must(AlignedBuffer::Make(plan_->table_bytes())));
  options_.job = "bench";
  options_.job_id = 1;
  options_.config = config.nvme();
  options_.paths.push_back({directory.path()});
  options_.backend = Must(ChooseIoBackend(IoBackend::kAuto, directory.path())).backend;
  options_.table = table_->bytes();
  options_.pool = pool_.get();
  tier_ = Must(NvmeTier::Open(*plan_, options_));
  file_ = directory.path() + "/second";
  MakeFile();
  mover_ = std::make_unique<TierMover>(*plan_, options_, std::vector<int>{fd_.get()});
  MustBeOk(mover_->Prepare());
}

void NvmeBed::MakeFile() {
  fd_ = UniqueFd(::open(file_.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
  ZS_CHECK(fd_.valid(), "no file beside the tier's");
  const uint64_t bytes = plan_->extents().file_bytes(0);
  MustBeOk(ReserveSpace(fd_.get(), bytes, file_));
  const DirectBuffer zeros(kFillBytes);
  for (uint64_t at = 0; at < bytes; at += kFillBytes) {
    const auto piece = zeros.span().first(std::min(kFillBytes, bytes - at));
    MustBeOk(WriteAllAt(fd_.get(), piece, at, file_));
  }
}

NvmeBed::Slots NvmeBed::NextSlots() {
  const uint64_t first = plan_->extents().slot(2 * first_).offset;
  const uint64_t second = plan_->extents().slot(2 * first_ + 1).offset;
  swapped_ = !swapped_;
  return swapped_ ? Slots{first, second} : Slots{second, first};
}

void NvmeBed::Transfer(bool write) {
  const Slots slots = NextSlots();
  const uint64_t bytes = image_bytes();
  std::vector<TierMove> moves(mover_->buffers());
  std::vector<TierMove*> free;
  for (TierMove& move : moves) free.push_back(&move);
  const auto start = [&](TierMove* move, uint64_t image, IoOperation operation) {
    move->operation = operation;
    const uint64_t base = operation == IoOperation::kRead ? slots.read : slots.write;
    move->offset = base + image * 2 * bytes;
    move->memory = mover_->buffer(static_cast<uint32_t>(move - moves.data()));
    move->bytes = bytes;
    mover_->Start(move);
  };
  uint64_t next = 0;
  const auto read_ahead = [&] {
    for (; next < images_ && !free.empty(); free.pop_back(), ++next) {
      start(free.back(), next, IoOperation::kRead);
    }
  };
  for (read_ahead(); free.size() < moves.size();) {
    std::vector<TierMove*> ended = mover_->Turn(absl::Milliseconds(50));
    for (; !ended.empty(); ended = mover_->Turn(absl::ZeroDuration())) {
      for (TierMove* move : ended) {
        MustBeOk(move->status);
        if (write && move->operation == IoOperation::kRead) {
          start(move, (move->offset - slots.read) / (2 * bytes), IoOperation::kWrite);
        } else {
          free.push_back(move);
        }
      }
      read_ahead();
    }
  }
}

}  // namespace zeroshard::bench
