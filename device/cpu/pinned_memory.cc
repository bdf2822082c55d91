#include "device/cpu/pinned_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/huge_page.h"
#include "base/status.h"
#include "device/cpu/lock_allowance.h"
#include "device/cpu/memory_node.h"

namespace zeroshard {
namespace {

// Brought in between two signs of life.
constexpr size_t kSlice = size_t{64} << 20;

// The calls of these names do nothing in a program with a sanitizer: the kernel is asked itself.
long LockNow(std::span<std::byte> memory) {
  return ::syscall(SYS_mlock, memory.data(), memory.size());
}
long LockOnTouch(std::span<std::byte> memory) {
  return ::syscall(SYS_mlock2, memory.data(), memory.size(), MLOCK_ONFAULT);
}
void Unlock(std::span<std::byte> memory) { ::syscall(SYS_munlock, memory.data(), memory.size()); }

// The word in brackets of a setting such as "always [madvise] never"; empty where there is none.
std::string Chosen(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "";
  return line.substr(open + 1, close - open - 1);
}

// Why the kernel gives no huge pages to memory that asks for them; empty when it does.
std::string HugePagesOff(const PinOptions& options) {
  const std::string& root = options.huge_page_settings;
  const char* name = options.kind == MemoryKind::kMemoryFile ? "shmem_enabled" : "enabled";
  // Newer kernels have a setting for each size; "inherit" means the common one.
  std::string path = absl::StrCat(root, "/hugepages-", kHugePageBytes / 1024, "kB/", name);
  std::string chosen = Chosen(path);
  if (chosen.empty() || chosen == "inherit") {
    path = absl::StrCat(root, "/", name);
    chosen = Chosen(path);
  }
  if (chosen.empty()) return "this kernel has no transparent huge pages";
  if (chosen != "never" && chosen != "deny") return "";
  return absl::StrCat(path, " is \"", chosen, "\"; \"",
                      options.kind == MemoryKind::kMemoryFile ? "advise" : "madvise",
                      "\" would give them to memory that asks");
}

void AskForHugePages(std::span<std::byte> memory, const PinOptions& options, PinnedResult& result) {
  // Only those inside: one that reaches beyond the end would hold more than was asked for.
  const std::span<std::byte> whole = WholeHugePages(memory);
  const bool aligned = reinterpret_cast<uintptr_t>(memory.data()) % kHugePageBytes == 0;
  if (whole.empty()) {
    result.huge_reason = "it is smaller than a huge page";
  } else if (options.kind == MemoryKind::kMemoryFile && !aligned) {
    result.huge_reason = "its address is not a huge page's";
  } else {
    result.huge_reason = HugePagesOff(options);
  }
  if (!result.huge_reason.empty()) return;
  if (::madvise(whole.data(), whole.size(), MADV_HUGEPAGE) != 0) {
    result.huge_reason = std::string(ErrnoError(errno, "madvise", "huge pages").message());
    return;
  }
  result.huge = true;
}

void Place(std::span<std::byte> memory, int node, PinnedResult& result) {
  const absl::Status placed = PlaceOnNode(memory, node);
  if (placed.ok()) {
    result.node = node;
  } else {
    result.node_reason = std::string(placed.message());
  }
}

// Brings the pages in, locked.
absl::Status BringIn(std::span<std::byte> memory, std::atomic<uint64_t>* progress) {
  for (size_t at = 0; at < memory.size(); at += kSlice) {
    const std::span<std::byte> slice = memory.subspan(at, std::min(kSlice, memory.size() - at));
    // Before Linux 5.14, mlock is the way.
    if (::madvise(slice.data(), slice.size(), MADV_POPULATE_WRITE) != 0 &&
        (errno != EINVAL || LockNow(slice) != 0)) {
      return ErrnoErrorAt(errno, "bring in", "its pages", at);
    }
    if (progress != nullptr) progress->fetch_add(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

// Why the kernel refused with `error` to lock `bytes`, and what to do about it.
absl::Status Refusal(int error, uint64_t bytes, uint64_t later_bytes) {
  const absl::StatusOr<LockAllowance> now = ReadLockAllowance();
  // A capability that did not help counts for nothing: it is one of a user namespace.
  const bool over = now.ok() && now->used_bytes + bytes > now->limit_bytes;
  if (over && (error == EPERM || error == ENOMEM || error == EAGAIN)) {
    return absl::ResourceExhaustedError(LockAdvice(*now, bytes + later_bytes));
  }
  return ErrnoError(error, "mlock2", absl::StrCat(bytes, " bytes"));
}

absl::Status Lock(std::span<std::byte> memory, const PinOptions& options) {
  // The limit is checked, and used up, for all pages before any of them is brought in.
  auto lock = [&] { return LockOnTouch(memory) == 0 ? 0 : errno; };
  int error = lock();
  if (error != 0 && RaiseLockLimit(memory.size())) error = lock();
  if (error != 0) return Refusal(error, memory.size(), options.later_bytes);
  if (options.on_touch) return absl::OkStatus();
  const absl::Status there = BringIn(memory, options.progress);
  if (!there.ok()) Unlock(memory);
  return there;
}

}  // namespace

absl::StatusOr<PinnedResult> PinMemory(std::span<std::byte> memory, const PinOptions& options) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  if (memory.empty() || reinterpret_cast<uintptr_t>(memory.data()) % page != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot pin ", options.what, ": ", memory.size(), " bytes at an offset of ",
                     reinterpret_cast<uintptr_t>(memory.data()) % page, " in their page"));
  }
  // The rest of the last page belongs to the mapping.
  memory = {memory.data(), (memory.size() + page - 1) / page * page};
  if (::madvise(memory.data(), memory.size(), MADV_DONTFORK) != 0) {
    return ErrnoError(errno, "advise DONTFORK on", options.what);
  }
  PinnedResult result;
  // First where, then how large, then all at once.
  if (options.node >= 0) Place(memory, options.node, result);
  if (options.huge_pages) AskForHugePages(memory, options, result);
  if (!options.lock) return result;
  const absl::Status locked = Lock(memory, options);
  if (locked.ok()) {
    result.locked_bytes = memory.size();
    return result;
  }
  result.unlocked_bytes = memory.size();
  result.warning = absl::StrCat(options.what, ": ", memory.size(),
                                " bytes cannot be locked in memory: ", locked.message());
  if (options.require) return absl::ResourceExhaustedError(result.warning);
  absl::StrAppend(&result.warning, "; they are used unlocked, and may be swapped out");
  return result;
}

}  // namespace zeroshard
