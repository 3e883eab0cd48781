// Integer dot products: sixteen products of 16-bit numbers at once, summed by neighbours to 32 bits.
// Codes of 8 bits are widened by one instruction for sixteen, where fp32 takes four.
#pragma once

#include "cpu/simd.h"

#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr int kWideLanes = 16;

typedef int8_t I8x16 __attribute__((vector_size(16)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef int16_t I16x16 __attribute__((vector_size(32)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

inline I16x16 load_wide(const int16_t* p) {
  I16x16 x;
  __builtin_memcpy(&x, p, 32);
  return x;
}
#if defined(__SSE4_1__) && !defined(__AVX2__)
// The compiler takes 32-byte vectors apart lane by lane where registers have 16 bytes.
struct Halves {
  __m128i first;
  __m128i last;
};
inline Halves halves(I16x16 x) {
  Halves result;
  __builtin_memcpy(&result, &x, sizeof(x));
  return result;
}
inline I16x16 join_halves(Halves x) {
  I16x16 result;
  __builtin_memcpy(&result, &x, sizeof(x));
  return result;
}
#endif

// 16 codes of 8 bits, as 16 bits.
inline I16x16 widen(I8x16 codes) {
#if defined(__AVX2__)
  return reinterpret_cast<I16x16>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(codes)));
#elif defined(__SSE4_1__)
  const auto x = reinterpret_cast<__m128i>(codes);
  return join_halves({_mm_cvtepi8_epi16(x), _mm_cvtepi8_epi16(_mm_srli_si128(x, 8))});
#else
  return __builtin_convertvector(codes, I16x16);
#endif
}
inline I8x16 load_codes(const int8_t* p) {
  I8x16 codes;
  __builtin_memcpy(&codes, p, 16);
  return codes;
}
inline I16x16 load_wide(const int8_t* p) { return widen(load_codes(p)); }
inline U16x16 load_wide(const uint8_t* p) {
#if defined(__AVX2__)
  return reinterpret_cast<U16x16>(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  U8x16 bytes;
  __builtin_memcpy(&bytes, p, 16);
  return __builtin_convertvector(bytes, U16x16);
#endif
}

// Two neighbours from memory, eight times.
inline I16x16 splat_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
#if defined(__SSE4_1__) && !defined(__AVX2__)
  return join_halves({_mm_set1_epi32(pair), _mm_set1_epi32(pair)});
#else
  return reinterpret_cast<I16x16>(I32x8{} + pair);
#endif
}

// Sums of the products of neighbours: lane i is a[2i] b[2i] + a[2i + 1] b[2i + 1].
inline I32x8 dot_pairs(I16x16 a, I16x16 b) {
#if defined(__AVX2__)
  return reinterpret_cast<I32x8>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE4_1__)
  const Halves x = halves(a), y = halves(b);
  return reinterpret_cast<I32x8>(
      join_halves({_mm_madd_epi16(x.first, y.first), _mm_madd_epi16(x.last, y.last)}));
#else
  const I32x8 x = reinterpret_cast<I32x8>(a);
  const I32x8 y = reinterpret_cast<I32x8>(b);
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

inline I32x8 add_dot_pairs(I32x8 sum, I16x16 a, I16x16 b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return reinterpret_cast<I32x8>(_mm256_dpwssd_epi32(
      reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return sum + dot_pairs(a, b);
#endif
}

// Sixteen columns of two rows as neighbours: columns 0..3 and 8..11 (a0, b0, a1, b1, ...), then the others.
// No element crosses the middle of a vector; restore_columns() takes that back.
struct RowPairs {
  I16x16 even;
  I16x16 odd;
};
inline RowPairs interleave(I16x16 a, I16x16 b) {
#if defined(__SSE4_1__) && !defined(__AVX2__)
  const Halves x = halves(a), y = halves(b);
  return {join_halves({_mm_unpacklo_epi16(x.first, y.first), _mm_unpacklo_epi16(x.last, y.last)}),
          join_halves({_mm_unpackhi_epi16(x.first, y.first), _mm_unpackhi_epi16(x.last, y.last)})};
#else
  return {__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27),
          __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31)};
#endif
}
inline F32x16 restore_columns(F32x8 even, F32x8 odd) {
  return join(__builtin_shufflevector(even, odd, 0, 1, 2, 3, 8, 9, 10, 11),
              __builtin_shufflevector(even, odd, 4, 5, 6, 7, 12, 13, 14, 15));
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
