// Settings of the fake NCCL, its counts, and how it complains. Any thread.
#ifndef ZEROSHARD_TESTS_FAKES_NCCL_SETTINGS_H_
#define ZEROSHARD_TESTS_FAKES_NCCL_SETTINGS_H_

#include <nccl.h>

#include <cstdint>
#include <string>

namespace zeroshard::fake_nccl {

// Of ZEROSHARD_FAKE_NCCL: words divided by commas. <k> counts the operations of each communicator
// from 1; a group is one.
struct Settings {
  int version = NCCL_VERSION_CODE;  // version=<code>: what ncclGetVersion says
  uint64_t hang_at = 0;             // hang:<k>: it is on the stream and never ends
  uint64_t error_at = 0;            // error:<k>: the same, and the asynchronous error is set
  uint64_t fail_at = 0;             // fail:<k>: ncclGroupEnd fails
  uint64_t launch_hang_at = 0;      // launch-hang:<k>: it never comes on the stream
  bool init_hangs = false;          // init-hangs: communicators are in progress for ever
  bool init_fails = false;          // init-fails
  bool abort_hangs = false;         // abort-hangs: until the settings change
  bool dead_peer_is_error = false;  // dead-peer=error (or hang, the default)
  bool registers_nothing = false;   // registers-nothing: as with NCCL_LOCAL_REGISTER=0
  int rank = -1;                    // rank=<r>: the faults above are of this rank only
};

// Ends the process over a word that is unknown.
Settings ParseSettings(const std::string& text);

Settings CurrentSettings();
void SetSettings(const char* text);
// The settings with no fault when they are for another rank.
Settings SettingsOf(int rank);

void Count(const char* name);
uint64_t CountOf(const std::string& name);

// What ncclGetLastError returns on this thread, next.
void SetLastError(const std::string& text);
const char* LastError();

// A use that the real library has undefined: one sentence, and the end of the process.
[[noreturn]] void Misuse(const std::string& sentence);

}  // namespace zeroshard::fake_nccl

#endif  // ZEROSHARD_TESTS_FAKES_NCCL_SETTINGS_H_
