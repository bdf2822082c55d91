#include "client/write_guard.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/status.h"

namespace zeroshard {
namespace {

struct NamedRange {
  uintptr_t begin;
  uintptr_t end;
  std::string name;
};

// Immutable once published. Freed with its entry: who writes to a window while its session ends on
// another thread is beyond help.
struct Table {
  uintptr_t begin;
  uintptr_t end;
  std::vector<NamedRange> ranges;  // sorted
};

std::array<std::atomic<const Table*>, 64> g_tables;
std::atomic<bool> g_installed{false};
struct sigaction g_previous;

void Print(const char* text, size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = write(STDERR_FILENO, text, bytes);
    if (written <= 0) return;
    text += written;
    bytes -= static_cast<size_t>(written);
  }
}

void Print(const char* text) { Print(text, strlen(text)); }

// Only calls that are allowed in a signal handler.
void Explain(uintptr_t address) {
  for (const auto& slot : g_tables) {
    const Table* table = slot.load(std::memory_order_acquire);
    if (table == nullptr || address < table->begin || address >= table->end) continue;
    const auto after = std::upper_bound(
        table->ranges.begin(), table->ranges.end(), address,
        [](uintptr_t value, const NamedRange& range) { return value < range.begin; });
    if (after != table->ranges.begin() && address < std::prev(after)->end) {
      Print("zeroshard: parameter '");
      Print(std::prev(after)->name.data(), std::prev(after)->name.size());
      Print("' is read-only: ");
    } else {
      Print("zeroshard: the parameter window is read-only: ");
    }
    Print(
        "its memory is shared by all ranks. Change values inside "
        "zeroshard.zero.GatheredParameters(..., modifier_rank=R), or with Put in C++.\n");
    return;
  }
}

void OnFault(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  if (info->si_code == SEGV_ACCERR) Explain(reinterpret_cast<uintptr_t>(info->si_addr));
  errno = saved_errno;
  if ((g_previous.sa_flags & SA_SIGINFO) != 0 && g_previous.sa_sigaction != nullptr) {
    g_previous.sa_sigaction(signal, info, context);
  } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal);
  } else {
    // The faulting instruction runs again and ends the process.
    sigaction(SIGSEGV, &g_previous, nullptr);
  }
}

const Table* MakeTable(const Session& session) {
  const auto begin = reinterpret_cast<uintptr_t>(session.parameter_window().data());
  auto* table = new Table{begin, begin + session.parameter_window().size(), {}};
  const Layout& layout = session.layout();
  for (uint32_t i = 0; i < layout.parameters().size(); ++i) {
    const ParameterPlace& place = layout.place(i);
    if (place.elements == 0) continue;
    const Unit& unit = layout.units()[place.unit];
    const uintptr_t first = begin + unit.window_offset + place.offset * SizeOf(unit.dtype);
    table->ranges.push_back(
        {first, first + place.elements * SizeOf(unit.dtype), layout.parameters()[i].name});
  }
  std::sort(table->ranges.begin(), table->ranges.end(),
            [](const NamedRange& a, const NamedRange& b) { return a.begin < b.begin; });
  return table;
}

}  // namespace

absl::Status InstallWriteGuard() {
  if (g_installed.exchange(true)) return absl::OkStatus();
  struct sigaction action {};
  action.sa_sigaction = &OnFault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGSEGV, nullptr, &g_previous) != 0 || sigaction(SIGSEGV, &action, nullptr) != 0) {
    g_installed.store(false);
    return ErrnoError(errno, "sigaction", "SIGSEGV");
  }
  return absl::OkStatus();
}

WriteGuardEntry::WriteGuardEntry(const Session& session) {
  const Table* table = MakeTable(session);
  for (size_t i = 0; i < g_tables.size(); ++i) {
    const Table* empty = nullptr;
    if (g_tables[i].compare_exchange_strong(empty, table, std::memory_order_release)) {
      index_ = static_cast<int>(i);
      return;
    }
  }
  delete table;
}

WriteGuardEntry::~WriteGuardEntry() {
  if (index_ >= 0) delete g_tables[index_].exchange(nullptr, std::memory_order_acq_rel);
}

}  // namespace zeroshard
