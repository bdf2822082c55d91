#include "worker/optim/code_book.h"

#include "worker/optim/code_book_values.h"

namespace zeroshard {

using code_book_internal::MakeSigned;
using code_book_internal::MakeUnsigned;

static_assert(MakeSigned().value[0] < 0 && MakeUnsigned().value[255] == 1);

constexpr SignedBook kSignedBook = MakeSigned();
constexpr UnsignedBook kUnsignedBook = MakeUnsigned();

}  // namespace zeroshard
