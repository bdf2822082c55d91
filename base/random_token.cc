#include "base/random_token.h"

#include <sys/random.h>

#include <cerrno>
#include <cstddef>

#include "base/check.h"

namespace zeroshard {
namespace {

// Up to 256 bytes arrive whole once the generator is seeded; only an early boot can interrupt.
void FillRandom(void* target, size_t bytes) {
  ssize_t got = 0;
  do {
    got = ::getrandom(target, bytes, 0);
  } while (got < 0 && errno == EINTR);
  ZS_CHECK(got == static_cast<ssize_t>(bytes), "the kernel gave no random bytes");
}

}  // namespace

std::string RandomToken() {
  constexpr char kDigits[] = "0123456789abcdef";
  unsigned char bytes[32];
  FillRandom(bytes, sizeof(bytes));
  std::string token;
  token.reserve(2 * sizeof(bytes));
  for (const unsigned char byte : bytes) {
    token += kDigits[byte >> 4];
    token += kDigits[byte & 15];
  }
  return token;
}

uint64_t RandomId() {
  uint64_t id = 0;
  FillRandom(&id, sizeof(id));
  return id;
}

bool ConstantTimeEquals(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |=
        static_cast<unsigned>(static_cast<unsigned char>(a[i])) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

}  // namespace zeroshard
