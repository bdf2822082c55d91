#include "client/cli/nvme_bench.h"

#include <fcntl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/aligned_buffer.h"
#include "storage/file_io.h"
#include "storage/file_system_kind.h"

namespace zeroshard {
namespace {

constexpr size_t kBlocks[] = {size_t{256} << 10, size_t{1} << 20, size_t{4} << 20};
constexpr size_t kDepths[] = {2, 8, 32};
constexpr uint64_t kFileUnit = uint64_t{32} << 20;
constexpr absl::Duration kTransferTimeout = absl::Seconds(30);

double Percentile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  const size_t index = std::min(values.size() - 1, static_cast<size_t>(share * values.size()));
  std::nth_element(values.begin(), values.begin() + index, values.end());
  return values[index];
}

// One measurement: keeps `row.depth` transfers in flight for a time.
class Stream {
 public:
  Stream(IoQueue& queue, const AlignedBuffer& memory, int fd, uint64_t file_bytes, NvmeBenchRow row)
      : queue_(queue),
        memory_(memory),
        fd_(fd),
        row_(row),
        file_blocks_(file_bytes / row.block_bytes) {
    for (size_t i = 0; i < row.depth; ++i) free_.push_back(i);
    started_.resize(row.depth);
  }

  absl::StatusOr<NvmeBenchRow> Run(absl::Duration time, bool sync) {
    const absl::Duration begin = clock_.Elapsed();
    while (clock_.Elapsed() - begin < time) {
      while (!free_.empty()) ZS_RETURN_IF_ERROR(SubmitNext());
      ZS_RETURN_IF_ERROR(Collect());
    }
    while (free_.size() < row_.depth) ZS_RETURN_IF_ERROR(Collect());
    if (sync) ZS_RETURN_IF_ERROR(SyncFile(fd_, DescribeFd(fd_)));
    const double seconds = absl::ToDoubleSeconds(clock_.Elapsed() - begin);
    row_.transfers = latencies_.size();
    row_.gigabytes_per_second =
        static_cast<double>(row_.transfers) * static_cast<double>(row_.block_bytes) / seconds / 1e9;
    row_.p50_microseconds = Percentile(latencies_, 0.50);
    row_.p99_microseconds = Percentile(latencies_, 0.99);
    return row_;
  }

 private:
  IoTransfer Next() {
    const uint64_t number = next_++;
    const uint64_t half = file_blocks_ / 2;
    if (row_.access == NvmeAccess::kBoth && number % 2 == 0) {
      return {.operation = IoOperation::kRead, .offset = number / 2 % half * row_.block_bytes};
    }
    if (row_.access == NvmeAccess::kBoth) {
      return {.operation = IoOperation::kWrite,
              .offset = (half + number / 2 % half) * row_.block_bytes};
    }
    return {
        .operation = row_.access == NvmeAccess::kRead ? IoOperation::kRead : IoOperation::kWrite,
        .offset = number % file_blocks_ * row_.block_bytes};
  }

  absl::Status SubmitNext() {
    const size_t slot = free_.back();
    IoTransfer transfer = Next();
    transfer.fd = fd_;
    transfer.memory = memory_.data() + slot * row_.block_bytes;
    transfer.bytes = row_.block_bytes;
    transfer.tag = slot;
    transfer.deadline = Deadline::After(kTransferTimeout);
    started_[slot] = clock_.Elapsed();
    ZS_RETURN_IF_ERROR(queue_.Submit(transfer));
    free_.pop_back();
    return absl::OkStatus();
  }

  absl::Status Collect() {
    for (const IoCompletion& done : queue_.Wait(1, Deadline::After(absl::InfiniteDuration()))) {
      ZS_RETURN_IF_ERROR(done.status);
      latencies_.push_back(absl::ToDoubleMicroseconds(clock_.Elapsed() - started_[done.tag]));
      free_.push_back(done.tag);
    }
    return absl::OkStatus();
  }

  const SystemClock clock_;
  IoQueue& queue_;
  const AlignedBuffer& memory_;
  const int fd_;
  NvmeBenchRow row_;
  const uint64_t file_blocks_;
  uint64_t next_ = 0;
  std::vector<size_t> free_;
  std::vector<absl::Duration> started_;  // by slot
  std::vector<double> latencies_;
};

class Bench {
 public:
  explicit Bench(const NvmeBenchOptions& options) : options_(options) {}

  absl::StatusOr<NvmeBenchReport> Run() {
    ZS_RETURN_IF_ERROR(Open());
    const absl::Duration begin = clock_.Elapsed();
    absl::Status status = WriteFile();
    if (status.ok()) status = Measure(options_.time - (clock_.Elapsed() - begin));
    if (!status.ok()) return status;
    return std::move(report_);
  }

 private:
  absl::Status Open();
  absl::Status WriteFile();
  absl::Status Measure(absl::Duration time);
  absl::StatusOr<NvmeBenchRow> MeasureRow(const NvmeBenchRow& row, absl::Duration time);
  absl::StatusOr<std::unique_ptr<IoQueue>> Queue(size_t depth) const {
    return MakeIoQueue(backend_, {.depth = depth, .threads = std::min<size_t>(depth, 16)});
  }

  // Ends a queue; memory and file are given up when the drive still holds them.
  void End(IoQueue& queue) {
    if (queue.Close(Deadline::After(absl::Seconds(5))).empty()) return;
    std::move(*memory_).Abandon();
    (void)file_.fd.release();
  }

  const NvmeBenchOptions options_;
  const SystemClock clock_;
  NvmeBenchReport report_;
  IoBackend backend_ = IoBackend::kThreads;
  ScratchFile file_;
  std::optional<AlignedBuffer> memory_;
};

absl::Status Bench::Open() {
  report_.path = options_.path;
  ZS_ASSIGN_OR_RETURN(const FileSystemKind kind, FileSystemKindAt(options_.path));
  report_.file_system = kind.name;
  ZS_ASSIGN_OR_RETURN(report_.warnings,
                      CheckPlace(options_.path, kind, options_.allow_network_path));
  ZS_ASSIGN_OR_RETURN(const IoBackendChoice choice,
                      ChooseIoBackend(options_.backend, options_.path));
  backend_ = choice.backend;
  report_.backend = NameOf(choice.backend);
  report_.reason = choice.reason;
  if (choice.backend == IoBackend::kThreads && options_.backend == IoBackend::kAuto) {
    report_.warnings.push_back(choice.reason);
  }
  ZS_ASSIGN_OR_RETURN(file_, OpenScratchFile(options_.path));
  report_.direct = file_.direct;
  if (!file_.direct) {
    report_.warnings.push_back(
        absl::StrCat(options_.path,
                     " refuses O_DIRECT: transfers go through the page cache, "
                     "and reads may be figures of memory"));
  }
  struct statvfs volume = {};
  if (::statvfs(options_.path.c_str(), &volume) != 0) {
    return ErrnoError(errno, "statvfs", options_.path);
  }
  // Some file systems have no size.
  const uint64_t free_bytes =
      volume.f_blocks == 0 ? UINT64_MAX : uint64_t{volume.f_bavail} * volume.f_frsize;
  report_.file_bytes = std::min(options_.file_bytes, free_bytes / 4) / kFileUnit * kFileUnit;
  if (report_.file_bytes > 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(options_.path, " has ", free_bytes,
                                                   " bytes free; a quarter of that, or --size, "
                                                   "must be at least ",
                                                   kFileUnit));
}

// Writes the file once, for at most a third of the time; a slow drive gets a smaller file.
absl::Status Bench::WriteFile() {
  constexpr size_t kBlock = size_t{4} << 20;
  constexpr size_t kDepth = kFileUnit / kBlock;
  const size_t most = kBlocks[std::size(kBlocks) - 1] * kDepths[std::size(kDepths) - 1];
  ZS_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Make(most));
  memory_.emplace(std::move(memory));
  std::mt19937_64 random(1);  // drives compress what they can
  auto* words = reinterpret_cast<uint64_t*>(memory_->data());
  for (size_t i = 0; i < most / sizeof(uint64_t); ++i) words[i] = random();
  // In one piece where the file system can do that; the writes find out if there is no room.
  (void)::fallocate(file_.fd.get(), 0, 0, static_cast<off_t>(report_.file_bytes));
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<IoQueue> queue, Queue(kDepth));
  const Deadline deadline = Deadline::After(options_.time / 3);
  absl::Status status;
  uint64_t written = 0;
  while (status.ok() && written < report_.file_bytes && (written == 0 || !deadline.Passed())) {
    for (size_t i = 0; i < kDepth && status.ok(); ++i) {
      status = queue->Submit({.operation = IoOperation::kWrite,
                              .fd = file_.fd.get(),
                              .memory = memory_->data() + i * kBlock,
                              .bytes = kBlock,
                              .offset = written + i * kBlock,
                              .deadline = Deadline::After(kTransferTimeout)});
    }
    for (const IoCompletion& done :
         queue->Wait(kDepth, Deadline::After(absl::InfiniteDuration()))) {
      KeepFirstError(status, done.status);
    }
    written += kFileUnit;
  }
  End(*queue);
  ZS_RETURN_IF_ERROR(status);
  if (written < report_.file_bytes) {
    report_.warnings.push_back(absl::StrCat("the drive is slow: a file of ", written,
                                            " bytes instead of ", report_.file_bytes));
  }
  report_.file_bytes = written;
  return SyncFile(file_.fd.get(), options_.path);
}

absl::Status Bench::Measure(absl::Duration time) {
  std::vector<NvmeBenchRow> plan;
  for (const NvmeAccess access : {NvmeAccess::kRead, NvmeAccess::kWrite, NvmeAccess::kBoth}) {
    for (const size_t block : kBlocks) {
      for (const size_t depth : kDepths) {
        // Fewer blocks than twice those in flight would be measured on top of each other.
        if (2 * block * depth <= report_.file_bytes) {
          plan.push_back({.access = access, .block_bytes = block, .depth = depth});
        }
      }
    }
  }
  const absl::Duration each = std::max(time, options_.time / 3) / static_cast<int64_t>(plan.size());
  for (const NvmeBenchRow& row : plan) {
    ZS_ASSIGN_OR_RETURN(NvmeBenchRow measured, MeasureRow(row, each));
    report_.rows.push_back(measured);
  }
  return absl::OkStatus();
}

absl::StatusOr<NvmeBenchRow> Bench::MeasureRow(const NvmeBenchRow& row, absl::Duration time) {
  if (!file_.direct && row.access != NvmeAccess::kWrite) {
    ::posix_fadvise(file_.fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<IoQueue> queue, Queue(row.depth));
  Stream stream(*queue, *memory_, file_.fd.get(), report_.file_bytes, row);
  absl::StatusOr<NvmeBenchRow> measured = stream.Run(time, /*sync=*/!file_.direct);
  End(*queue);
  return measured;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> CheckPlace(const std::string& path,
                                                    const FileSystemKind& kind,
                                                    bool allow_network_path) {
  const std::string lies = absl::StrCat(path, " lies on ", kind.name);
  switch (kind.place) {
    case FileSystemPlace::kLocal:
      return std::vector<std::string>{};
    case FileSystemPlace::kMemory:
      return std::vector<std::string>{lies + ": these are figures of memory, not of a drive"};
    case FileSystemPlace::kNetwork:
      break;
  }
  if (allow_network_path) {
    return std::vector<std::string>{lies + ", a network file system: others share it"};
  }
  return absl::FailedPreconditionError(
      absl::StrCat(lies,
                   ", a network file system: the nvme tier needs a local drive; "
                   "--allow-network-path measures it all the same"));
}

absl::StatusOr<NvmeBenchReport> RunNvmeBench(const NvmeBenchOptions& options) {
  return Bench(options).Run();
}

const NvmeBenchRow* BestRow(const std::vector<NvmeBenchRow>& rows) {
  double fastest = 0;
  for (const NvmeBenchRow& row : rows) {
    if (row.access == NvmeAccess::kBoth) fastest = std::max(fastest, row.gigabytes_per_second);
  }
  const NvmeBenchRow* best = nullptr;
  auto memory = [](const NvmeBenchRow& row) { return row.block_bytes * row.depth; };
  for (const NvmeBenchRow& row : rows) {
    if (row.access != NvmeAccess::kBoth || row.gigabytes_per_second < 0.95 * fastest) continue;
    if (best == nullptr || memory(row) < memory(*best) ||
        (memory(row) == memory(*best) && row.gigabytes_per_second > best->gigabytes_per_second)) {
      best = &row;
    }
  }
  return best;
}

}  // namespace zeroshard
