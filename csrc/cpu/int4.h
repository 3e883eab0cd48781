// Blocks of 16 int4 codes (layout: core/scorer.h), and integer dot products with codes.
#pragma once

#include "core/scorer.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Codes are used as they are stored, plus 8: whoever sums them up takes the 8s off in one go.
inline constexpr int kInt4Offset = 8;

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
// 16 codes of 8 bits, as 16 bits.
inline I16x16 load_wide(const int8_t* p) {
#if defined(__AVX2__)
  return reinterpret_cast<I16x16>(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  I8x16 codes;
  __builtin_memcpy(&codes, p, 16);
  return __builtin_convertvector(codes, I16x16);
#endif
}
inline U16x16 load_wide(const uint8_t* p) {
#if defined(__AVX2__)
  return reinterpret_cast<U16x16>(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  U8x16 bytes;
  __builtin_memcpy(&bytes, p, 16);
  return __builtin_convertvector(bytes, U16x16);
#endif
}

// Sums of the products of neighbours: lane i is a[2i] b[2i] + a[2i + 1] b[2i + 1].
inline I32x8 dot_pairs(I16x16 a, I16x16 b) {
#if defined(__AVX2__)
  return reinterpret_cast<I32x8>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  const I32x8 x = reinterpret_cast<I32x8>(a);
  const I32x8 y = reinterpret_cast<I32x8>(b);
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// The first and the last eight codes of a block, plus 8 each, as fp32.
struct Int4Block {
  F32x8 first;
  F32x8 last;
};
inline Int4Block load_int4(const uint8_t* block) {
#if defined(__AVX2__)
  const auto wide =
      reinterpret_cast<I32x8>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block))));
#else
  I32x8 wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = block[i];
#endif
  return {__builtin_convertvector(wide & 15, F32x8), __builtin_convertvector(wide >> 4, F32x8)};
}

// codes: integers in [-7, 7], n of them; the rest of the last block becomes 0.
inline void pack_int4(const float* codes, int64_t n, uint8_t* blocks) {
  for (int64_t first = 0; first < n; first += core::kInt4Block, blocks += core::kInt4BlockBytes) {
    int stored[core::kInt4Block];
    for (int64_t i = 0; i < core::kInt4Block; ++i) {
      stored[i] = kInt4Offset + (first + i < n ? static_cast<int>(codes[first + i]) : 0);
    }
    for (int64_t i = 0; i < core::kInt4BlockBytes; ++i) {
      blocks[i] = static_cast<uint8_t>(stored[i] | stored[i + core::kInt4BlockBytes] << 4);
    }
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
