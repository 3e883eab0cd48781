// Products of pairs of bf16, summed in fp32 (AVX512-BF16), and softmax numerators as bf16 weights.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include "cpu/simd.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

using core::BFloat16;

// Masks of AVX-512 for what exists of 32 lanes; a load does not touch the memory of the others.
inline __mmask32 first_lanes(int64_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

// Lane i: sum + a[2i] b[2i] + a[2i + 1] b[2i + 1].
inline __m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Two neighbours from memory, sixteen times.
inline __m512i splat_pair(const BFloat16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

// Two rows of sixteen, element by element.
inline __m512i pair_up(__m512i rows) {
  typedef uint16_t U16x32 __attribute__((vector_size(64)));
  constexpr U16x32 kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(kOrder), rows);
}
inline __m512i pair_up(__m256i first, __m256i second) {
  return pair_up(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
}

// Sixteen logits, of which n exist, -inf behind them.
inline __m512 load_logits(const float* logits, int64_t n) {
  return _mm512_mask_loadu_ps(_mm512_set1_ps(kMinusInfinity), static_cast<__mmask16>(first_lanes(n)), logits);
}

inline float largest_logit(const float* logits, int64_t n) {
  __m512 max = _mm512_set1_ps(kMinusInfinity);
  for (int64_t i = 0; i < n; i += 16) max = _mm512_max_ps(load_logits(logits + i, n - i), max);  // NaN loses
  return _mm512_reduce_max_ps(max);
}

// exp(x) for x <= 0, NaN stays NaN: 2^floor(y) times a polynomial for 2^(y - floor(y)) that is off by less
// than 2e-7. Rounding y costs 6e-8 |x|, as much as rounding the logits did.
inline __m512 sixteen_exps(__m512 x) {
  const __m512 y = x * 1.44269504F;
  const __m512 fraction = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
  __m512 power = _mm512_set1_ps(1.86713011e-3F);
  for (const float c : {9.01703022e-3F, 5.57999132e-2F, 0.240164450F, 0.693151312F, 1.0F}) {
    power = power * fraction + c;
  }
  return _mm512_scalef_ps(power, y);
}

struct NumeratorSums {
  float exact;
  float rounded;
};

// weights[i] = exp(logits[i] - max), rounded; up to eight numbers behind the last are overwritten.
inline NumeratorSums round_numerators(const float* logits, int64_t n, float max, BFloat16* weights) {
  // A row whose logits are all -inf keeps them at 0 instead of NaN.
  const float shift = max == kMinusInfinity ? 0.0F : max;
  const auto ones = reinterpret_cast<__m256bh>(_mm256_set1_epi16(0x3f80));
  __m512 exact = _mm512_setzero_ps();
  __m256 rounded = _mm256_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 numerators = sixteen_exps(load_logits(logits + i, n - i) - shift);
    const __m256bh narrow = _mm512_cvtneps_pbh(numerators);
    __builtin_memcpy(weights + i, &narrow, sizeof(narrow));
    exact += numerators;
    rounded = _mm256_dpbf16_ps(rounded, narrow, ones);
  }
  return {_mm512_reduce_add_ps(exact), horizontal_sum(reinterpret_cast<F32x8>(rounded))};
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET

#endif
