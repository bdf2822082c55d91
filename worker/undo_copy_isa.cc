// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (worker/kernels.bzl). All functions
// have internal linkage, so that the linker cannot mix instruction sets.
#include "worker/undo_copy.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::protected_internal {
namespace {

typedef int64_t Line __attribute__((vector_size(64), aligned(1), may_alias));

void Copy(void* __restrict destination, const void* __restrict source, uint64_t bytes) {
  auto* to = static_cast<unsigned char*>(destination);
  const auto* from = static_cast<const unsigned char*>(source);
  for (; bytes >= sizeof(Line); bytes -= sizeof(Line)) {
    *reinterpret_cast<Line*>(to) = *reinterpret_cast<const Line*>(from);
    to += sizeof(Line);
    from += sizeof(Line);
  }
  for (uint64_t i = 0; i < bytes; ++i) to[i] = from[i];
}

}  // namespace

const CopyFn ZS_CONCAT(kUndoCopy, ZS_ISA) = Copy;

}  // namespace zeroshard::protected_internal
