// The checksum of everything that is stored: XXH3, 64 bits. Finds accidents, not attackers.

#ifndef ZEROSHARD_BASE_CHECKSUM_H_
#define ZEROSHARD_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace zeroshard {

uint64_t Xxh3_64(const void* data, size_t bytes, uint64_t seed = 0);

inline uint64_t Xxh3_64(std::span<const std::byte> data, uint64_t seed = 0) {
  return Xxh3_64(data.data(), data.size(), seed);
}

inline uint64_t Xxh3_64(std::string_view data, uint64_t seed = 0) {
  return Xxh3_64(data.data(), data.size(), seed);
}

// The same value as Xxh3_64 over the concatenation of all that was added, in pieces of any size.
// One thread at a time.
class Xxh3Stream {
 public:
  explicit Xxh3Stream(uint64_t seed = 0);
  ~Xxh3Stream();
  Xxh3Stream(Xxh3Stream&&) noexcept;
  Xxh3Stream& operator=(Xxh3Stream&&) noexcept;

  void Update(const void* data, size_t bytes);
  void Update(std::string_view data) { Update(data.data(), data.size()); }

  // The value so far; more may be added afterwards.
  uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_CHECKSUM_H_
