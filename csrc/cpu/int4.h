// Blocks of 16 int4 codes (layout: core/scorer.h), read as fp32.
#pragma once

#include "core/scorer.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Eight codes of a block plus 8 each (0 to 15, as they are stored): the low halves of its bytes are its first
// eight codes, the high halves the others. Whoever sums them up takes the 8s off in one go.
inline F32x8 load_low_codes(const uint8_t* block) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block)));
  return reinterpret_cast<F32x8>(_mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15))));
#else
  F32x8 codes;
  for (int i = 0; i < kLanes; ++i) codes[i] = static_cast<float>(block[i] & 15);
  return codes;
#endif
}
inline F32x8 load_high_codes(const uint8_t* block) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block)));
  return reinterpret_cast<F32x8>(_mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4)));
#else
  F32x8 codes;
  for (int i = 0; i < kLanes; ++i) codes[i] = static_cast<float>(block[i] >> 4);
  return codes;
#endif
}

inline constexpr float kInt4Offset = 8.0F;

// codes: integers in [-7, 7], n of them; the rest of the last block becomes 0.
inline void pack_int4(const float* codes, int64_t n, uint8_t* blocks) {
  for (int64_t first = 0; first < n; first += core::kInt4Block, blocks += core::kInt4BlockBytes) {
    int stored[core::kInt4Block];
    for (int64_t i = 0; i < core::kInt4Block; ++i) {
      stored[i] = first + i < n ? static_cast<int>(codes[first + i] + kInt4Offset) : 8;
    }
    for (int64_t i = 0; i < core::kInt4BlockBytes; ++i) {
      blocks[i] = static_cast<uint8_t>(stored[i] | stored[i + core::kInt4BlockBytes] << 4);
    }
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
