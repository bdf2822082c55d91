// The write guard: says which parameter a trainer tried to change in place.
//
// Gathered parameters are mapped read-only, so `weight.add_(1)` is a SIGSEGV. With the guard such a
// fault first prints "parameter 'x' is read-only" and what to do instead, and then goes on to
// whatever handled SIGSEGV before (Python's faulthandler, or the default, which ends the process).
#ifndef ZEROSHARD_CLIENT_WRITE_GUARD_H_
#define ZEROSHARD_CLIENT_WRITE_GUARD_H_

#include "absl/status/status.h"
#include "client/session.h"

namespace zeroshard {

// Installs the handler; a second call does nothing. Any thread.
absl::Status InstallWriteGuard();

// Tells the guard the names of a session's parameters, for as long as this object lives; it must
// end before the session does. At most 64 at a time, further ones are not named.
class WriteGuardEntry {
 public:
  explicit WriteGuardEntry(const Session& session);
  ~WriteGuardEntry();
  WriteGuardEntry(const WriteGuardEntry&) = delete;
  WriteGuardEntry& operator=(const WriteGuardEntry&) = delete;

 private:
  int index_ = -1;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_WRITE_GUARD_H_
