// Blocks of 16 int4 codes (layout: core/scorer.h).
#pragma once

#include "core/scorer.h"
#include "cpu/dot_pairs.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Codes are used as they are stored, plus 8: whoever sums them up takes the 8s off in one go.
inline constexpr int kInt4Offset = 8;

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
