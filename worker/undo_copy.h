// The copy of a group into its undo record. Groups have hundreds of bytes, where the C library's
// memcpy may choose a string instruction with a start-up cost as high as the whole update of the
// group; so this one is a plain loop per instruction set.
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_UNDO_COPY_H_
#define ZEROSHARD_WORKER_UNDO_COPY_H_

#include <cstdint>

namespace zeroshard::protected_internal {

// The ranges do not overlap; any alignment.
using CopyFn = void (*)(void* destination, const void* source, uint64_t bytes);

extern const CopyFn kUndoCopyV2;
extern const CopyFn kUndoCopyV3;
extern const CopyFn kUndoCopyV4;

}  // namespace zeroshard::protected_internal

#endif  // ZEROSHARD_WORKER_UNDO_COPY_H_
