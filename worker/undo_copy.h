// The copy of a group into its undo record. Groups have hundreds of bytes an array, where the C
// library's memcpy may choose a string instruction with a start-up cost as high as the whole update
// of the group; so this one is a plain loop per instruction set, called once for all arrays.
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_UNDO_COPY_H_
#define ZEROSHARD_WORKER_UNDO_COPY_H_

#include <cstdint>

namespace zeroshard::protected_internal {

struct CopySource {
  const unsigned char* data;  // of element 0
  uint64_t element_bytes;
};

// Copies the elements [begin, begin + elements) of each source, one source after the other; returns
// the end of the copy. The ranges do not overlap, any alignment.
using CopyFn = unsigned char* (*)(unsigned char* destination, const CopySource* sources,
                                  uint32_t count, uint64_t begin, uint64_t elements);

extern const CopyFn kUndoCopyV2;
extern const CopyFn kUndoCopyV3;
extern const CopyFn kUndoCopyV4;

}  // namespace zeroshard::protected_internal

#endif  // ZEROSHARD_WORKER_UNDO_COPY_H_
