#include "server/tier_use.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/node_memory.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kMarkEvery = absl::Seconds(10);
constexpr double kBottleneck = 0.2;  // part of the passes that is spent waiting

uint64_t Since(uint64_t now, uint64_t before) { return now > before ? now - before : 0; }

absl::Duration MicrosSince(uint64_t now, uint64_t before) {
  return absl::Microseconds(static_cast<int64_t>(Since(now, before)));
}

std::string MegabytesPerSecond(uint64_t bytes, absl::Duration time) {
  const double seconds = std::max(1e-6, absl::ToDoubleSeconds(time));
  return absl::StrFormat("%.0f MB/s", static_cast<double>(bytes) / 1e6 / seconds);
}

std::string Seconds(absl::Duration time) {
  return absl::StrFormat("%.3g s", absl::ToDoubleSeconds(time));
}

}  // namespace

void TierHistory::Add(const internal::v1::Stats& stats, absl::Duration now) {
  const bool again = begun_ && (stats.nvme_pass_us() < last_.stats.nvme_pass_us() ||
                                stats.nvme_compute_us() < last_.stats.nvme_compute_us());
  last_ = {stats, now};
  if (!begun_ || again) {
    older_ = newer_ = last_;
    begun_ = true;
  } else if (now - newer_.at >= kMarkEvery) {
    older_ = newer_;
    newer_ = last_;
  }
}

TierWindow TierHistory::window() const {
  TierWindow window;
  const internal::v1::Stats& now = last_.stats;
  const internal::v1::Stats& before = older_.stats;
  window.length = last_.at - older_.at;
  window.steps = Since(now.step(), before.step());
  window.passes = MicrosSince(now.nvme_pass_us(), before.nvme_pass_us());
  window.waiting = MicrosSince(now.nvme_wait_us(), before.nvme_wait_us());
  window.compute = MicrosSince(now.nvme_compute_us(), before.nvme_compute_us());
  for (int p = 0; p < now.nvme_paths_size(); ++p) {
    const internal::v1::NvmePathStats& path = now.nvme_paths(p);
    const internal::v1::NvmePathStats old =
        p < before.nvme_paths_size() ? before.nvme_paths(p) : internal::v1::NvmePathStats();
    window.paths.push_back({Since(path.read_bytes(), old.read_bytes()),
                            Since(path.written_bytes(), old.written_bytes()),
                            MicrosSince(path.busy_us(), old.busy_us())});
  }
  return window;
}

std::string DescribeBottleneck(std::span<const TierWindow> windows,
                               std::span<const NvmePathConfig> paths, uint32_t lanes) {
  TierWindow sum;
  sum.paths.resize(paths.size());
  for (const TierWindow& one : windows) {
    sum.length = std::max(sum.length, one.length);
    sum.steps = std::max(sum.steps, one.steps);
    sum.passes += one.passes;
    sum.waiting += one.waiting;
    sum.compute += one.compute;
    for (size_t p = 0; p < std::min(paths.size(), one.paths.size()); ++p) {
      sum.paths[p].read += one.paths[p].read;
      sum.paths[p].written += one.paths[p].written;
      // Workers use a path at the same time.
      sum.paths[p].busy = std::max(sum.paths[p].busy, one.paths[p].busy);
    }
  }
  if (sum.steps == 0 || sum.waiting <= kBottleneck * sum.passes) return "";
  std::vector<std::string> speeds;
  uint64_t moved = 0;
  for (size_t p = 0; p < paths.size(); ++p) {
    const TierWindow::Path& path = sum.paths[p];
    moved += path.read + path.written;
    speeds.push_back(absl::StrCat(paths[p].path, " read ", MegabytesPerSecond(path.read, path.busy),
                                  " and written ", MegabytesPerSecond(path.written, path.busy)));
  }
  const auto steps = static_cast<int64_t>(sum.steps);
  const auto workers = static_cast<int64_t>(windows.size());
  return absl::StrCat(
      "the drives are the bottleneck: ", absl::StrJoin(speeds, ", "), " while busy; a step moves ",
      HumanBytes(moved / sum.steps), " in ", Seconds(sum.passes / (steps * workers)), ", of which ",
      Seconds(sum.waiting / (steps * workers)), " is waiting; compute alone would take ",
      Seconds(sum.compute / (steps * workers * std::max(1u, lanes))),
      ". Add drives, keep more states on the host (offload_optimizer.ratio, zeroshard move), or "
      "take larger steps (gradient_accumulation_steps)");
}

}  // namespace zeroshard
