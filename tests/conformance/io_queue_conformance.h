// What every IoQueue must do, as functions that each implementation's test runs.
#ifndef ZEROSHARD_TESTS_CONFORMANCE_IO_QUEUE_CONFORMANCE_H_
#define ZEROSHARD_TESTS_CONFORMANCE_IO_QUEUE_CONFORMANCE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "storage/io_queue.h"
#include "tests/conformance/stalled_read.h"

namespace zeroshard {

struct IoQueueCase {
  std::string name;
  std::function<absl::StatusOr<std::unique_ptr<IoQueue>>(size_t depth)> make;
  // A read that does not complete by itself; null when this process may not have one.
  std::function<std::unique_ptr<StalledRead>()> stall;
  bool cancels = false;  // such a read ends when it is cancelled

  friend void PrintTo(const IoQueueCase& test, std::ostream* out) { *out << test.name; }
};

// Sizes from one sector to 16 MiB, odd multiples of 4 KiB among them, where the file takes
// O_DIRECT; any sizes, offsets and memory where it does not.
void TestDirectSizes(const IoQueueCase& queue);
void TestBufferedSizes(const IoQueueCase& queue);
// Depths 1 to 128 on many files at once, in random order; a full queue refuses and loses nothing.
void TestManyFilesAtEveryDepth(const IoQueueCase& queue);
void TestFullQueueRefuses(const IoQueueCase& queue);
// Wait returns what there is: at once, at the deadline, or when nothing more can come.
void TestWaitReturns(const IoQueueCase& queue);
// Each error names operation, file and offset, and leaves the queue as it is.
void TestErrors(const IoQueueCase& queue);
void TestEndOfFile(const IoQueueCase& queue);
void TestImpossibleTransfers(const IoQueueCase& queue);
void TestNoSpace(const IoQueueCase& queue);
void TestFailingDevice(const IoQueueCase& queue);
// A transfer past its deadline is reported once, and fails the queue; the others still end.
void TestDeadline(const IoQueueCase& queue);
// Memory is the caller's again after destruction; after Close, except for what Close names.
void TestDestructionInFlight(const IoQueueCase& queue);
void TestCloseNamesWhatIsHeld(const IoQueueCase& queue);
// After 10,000 transfers the process has the descriptors, threads and memory it had before.
void TestNothingLeaks(const IoQueueCase& queue);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_CONFORMANCE_IO_QUEUE_CONFORMANCE_H_
