// What a forked child must not share with a trainer.
//
// A child (a DataLoader's worker) inherits descriptors and would keep the trainer's connections
// open after its death, so that the daemon would not see it die. Connections registered here are
// closed in every forked child. Callable from any thread; the handler uses no lock and no heap.
#ifndef ZEROSHARD_CLIENT_FORK_GUARD_H_
#define ZEROSHARD_CLIENT_FORK_GUARD_H_

#include <cstdint>

namespace zeroshard {

// Differs between a process and its forked children: an object that stored it at its creation knows
// that it woke up in a child. A load of one word.
uint64_t ForkGeneration();

// Closes `fd` in forked children from now on. The registration ends by itself: once the number
// names another file, or none, it does nothing. At most 256 connections are watched; the oldest
// goes.
void CloseInForkedChildren(int fd);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_FORK_GUARD_H_
