// Makes the code books (worker/optim/code_book.h) at compile time, for host code and for GPUs.
#ifndef ZEROSHARD_WORKER_OPTIM_CODE_BOOK_VALUES_H_
#define ZEROSHARD_WORKER_OPTIM_CODE_BOOK_VALUES_H_

#include <array>
#include <bit>
#include <cstddef>

#include "worker/optim/code_book.h"

namespace zeroshard::code_book_internal {

inline constexpr int kDecades = 7;

// The non-negative numbers of a book in increasing order: 0, the midpoints, 1. Each midpoint is a
// quotient of two integers that a double holds exactly.
template <int kNumbers>
constexpr std::array<float, kNumbers> Magnitudes(int parts_of_first_decade) {
  std::array<float, kNumbers> numbers = {};
  int at = 1;
  double scale = 1e7;  // 10^(7 - i)
  for (int decade = 0; decade < kDecades; ++decade, scale /= 10) {
    const int parts = parts_of_first_decade << decade;
    for (int part = 0; part < parts; ++part) {
      // 0.1 + 0.9 * (part + 1/2) / parts, times 10^(i - 6)
      const int numerator = 2 * parts + 9 * (2 * part + 1);
      numbers[at++] = static_cast<float>(numerator / (2.0 * parts * scale));
    }
  }
  numbers[at] = 1.0f;
  return numbers;
}

// The smallest number that is nearer to b than to a < b.
constexpr uint32_t BorderBits(float a, float b) {
  const double middle = (double{a} + double{b}) / 2;
  const auto rounded = static_cast<float>(middle);
  const uint32_t bits = std::bit_cast<uint32_t>(rounded);
  return double{rounded} > middle ? bits : bits + 1;
}

// Fills the buckets; false when one would have two borders.
template <class Book, size_t kNumbers>
constexpr bool FillBuckets(const std::array<float, kNumbers>& numbers, Book& book) {
  uint32_t code = 0;  // at the bucket's start
  const auto border = [&](uint32_t above) {
    return above < kNumbers ? BorderBits(numbers[above - 1], numbers[above]) : ~0u;
  };
  for (int bucket = 0; bucket < Book::kBuckets; ++bucket) {
    const uint32_t begin = Book::kFirstBits + (static_cast<uint32_t>(bucket) << Book::kShift);
    const uint32_t end = begin + (1u << Book::kShift);
    while (border(code + 1) <= begin) ++code;
    const uint32_t next = border(code + 1);
    book.entry[bucket] = (code << Book::kShift) + (next < end ? end - next : 0);
    if (border(code + 2) < end) return false;
  }
  return code + 1 == kNumbers && kNumbers > 1;
}

constexpr SignedBook MakeSigned() {
  constexpr std::array<float, 129> kNumbers = Magnitudes<129>(1);
  SignedBook book = {};
  for (int code = 0; code < 256; ++code) {
    const int k = code - kSignedZero;
    book.value[code] = k >= 0 ? kNumbers[k] : -kNumbers[-k];
  }
  if (!FillBuckets(kNumbers, book)) book.value[0] = 0;
  return book;
}

constexpr UnsignedBook MakeUnsigned() {
  constexpr std::array<float, 256> kNumbers = Magnitudes<256>(2);
  UnsignedBook book = {};
  for (int code = 0; code < 256; ++code) book.value[code] = kNumbers[code];
  if (!FillBuckets(kNumbers, book)) book.value[255] = 0;
  return book;
}

}  // namespace zeroshard::code_book_internal

#endif  // ZEROSHARD_WORKER_OPTIM_CODE_BOOK_VALUES_H_
