// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (worker/kernels.bzl). All functions
// have internal linkage, so that the linker cannot mix instruction sets.
#include "worker/undo_copy.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::protected_internal {
namespace {

typedef int64_t Line __attribute__((vector_size(64), aligned(1), may_alias));

inline __attribute__((always_inline)) unsigned char* CopyOne(unsigned char* to,
                                                             const CopySource& source,
                                                             uint64_t begin, uint64_t elements) {
  const unsigned char* from = source.data + begin * source.element_bytes;
  uint64_t bytes = elements * source.element_bytes;
  for (; bytes >= sizeof(Line); bytes -= sizeof(Line)) {
    *reinterpret_cast<Line*>(to) = *reinterpret_cast<const Line*>(from);
    to += sizeof(Line);
    from += sizeof(Line);
  }
  for (; bytes > 0; --bytes) *to++ = *from++;
  return to;
}

// Each of the first sources has load instructions of its own: a processor that prefetches by the
// strides of instructions sees one array behind each.
unsigned char* Copy(unsigned char* to, const CopySource* sources, uint32_t count, uint64_t begin,
                    uint64_t elements) {
  if (count > 0) to = CopyOne(to, sources[0], begin, elements);
  if (count > 1) to = CopyOne(to, sources[1], begin, elements);
  if (count > 2) to = CopyOne(to, sources[2], begin, elements);
  if (count > 3) to = CopyOne(to, sources[3], begin, elements);
  for (uint32_t i = 4; i < count; ++i) to = CopyOne(to, sources[i], begin, elements);
  return to;
}

}  // namespace

const CopyFn ZS_CONCAT(kUndoCopy, ZS_ISA) = Copy;

}  // namespace zeroshard::protected_internal
