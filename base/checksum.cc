#include "base/checksum.h"

// The streaming state is a complete type only with this.
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

namespace zeroshard {

uint64_t Xxh3_64(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

// XXH3_state_t asks for 64-byte alignment, which the aligned operator new gives.
struct Xxh3Stream::State {
  XXH3_state_t xxh;
};

Xxh3Stream::Xxh3Stream(uint64_t seed) : state_(std::make_unique<State>()) {
  XXH3_64bits_reset_withSeed(&state_->xxh, seed);
}

Xxh3Stream::~Xxh3Stream() = default;
Xxh3Stream::Xxh3Stream(Xxh3Stream&&) noexcept = default;
Xxh3Stream& Xxh3Stream::operator=(Xxh3Stream&&) noexcept = default;

void Xxh3Stream::Update(const void* data, size_t bytes) {
  XXH3_64bits_update(&state_->xxh, data, bytes);
}

uint64_t Xxh3Stream::Digest() const { return XXH3_64bits_digest(&state_->xxh); }

}  // namespace zeroshard
