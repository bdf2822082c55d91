// What the fake libnccl.so.2 exports beside NCCL's functions: control and counts for tests that
// link
// //tests/fakes/nccl:fake_nccl. docs/testing.md, "The fake NCCL", has the settings.
#ifndef ZEROSHARD_TESTS_FAKES_NCCL_FAKE_NCCL_H_
#define ZEROSHARD_TESTS_FAKES_NCCL_FAKE_NCCL_H_

#include <cstdint>

extern "C" {

// Takes these settings (the text of ZEROSHARD_FAKE_NCCL; null: the environment's) for what is
// called from now on, ends aborts that hang, and forgets the counts.
void FakeNcclReset(const char* settings);

// How often a function was called ("ncclAllGather") since the reset; "communicators": how many
// live.
uint64_t FakeNcclCalls(const char* name);

}  // extern "C"

#endif  // ZEROSHARD_TESTS_FAKES_NCCL_FAKE_NCCL_H_
