// Fits the low-rank summary of one page (formula and reasons: tinyserve_ops/reference/low_rank.py): one rank
// after the other takes the leading direction of what the ranks before it, as quantised, have left.
#pragma once

#include "core/limits.h"
#include "core/scorer.h"
#include "cpu/codes.h"
#include "cpu/int4.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr int kNumPowerIterations = 2;
inline constexpr float kMaxMeanCode = 127.0F;
inline constexpr float kMaxInt4Code = 7.0F;
// The largest key is scaled to [1, 2) first; residuals shorter than this may be rounding noise of the mean.
inline constexpr float kNoise = 0x1p-16F;

inline float dot(const float* a, const float* b, int64_t n) {
  F32x8 even = splat(0.0F);
  F32x8 odd = splat(0.0F);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even += load(a + i) * load(b + i);
    odd += load(a + i + kLanes) * load(b + i + kLanes);
  }
  if (i < n) even += load(a + i) * load(b + i);
  return horizontal_sum(even + odd);
}

inline float largest_magnitude(const float* x, int64_t n) {
  F32x8 largest = splat(0.0F);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x8 magnitude = absolute(load(x + i));
    largest = magnitude > largest ? magnitude : largest;
  }
  return horizontal_maximum(largest);
}

// The smallest bf16 number that is not below x (finite, not negative).
inline float round_up_to_bf16(float x) { return bits_to_float((float_to_bits(x) + 0xffffU) & 0xffff0000U); }

// To the nearest code, halves away from zero; all 0 where the scale is 0.
inline void quantise(const float* values, int64_t n, float scale, float max_code, float* codes) {
  if (!(scale > 0.0F)) {
    __builtin_memset(codes, 0, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    store(codes + i, nearest_code(load(values + i) / splat(scale), max_code));
  }
}

// 2^exponent for a normal result.
inline float power_of_two(int exponent) { return bits_to_float(static_cast<uint32_t>(exponent + 127) << 23); }

// Makes keys finite (NaN 0, infinities the largest number) and scales them by a power of two, so that the
// largest magnitude lies in [1, 2) and every product stays in range; returns the exponent.
inline int normalise(float* keys, int64_t n) {
  F32x8 amax = splat(0.0F);
  for (int64_t i = 0; i < n; i += kLanes) {
    F32x8 x = load(keys + i);
    x = select(x == x, x, splat(0.0F));
    x = x > splat(kLargestFloat) ? splat(kLargestFloat) : x;
    x = x < splat(-kLargestFloat) ? splat(-kLargestFloat) : x;
    store(keys + i, x);
    const F32x8 magnitude = absolute(x);
    amax = magnitude > amax ? magnitude : amax;
  }
  const float largest = horizontal_maximum(amax);
  if (largest == 0.0F) return 0;
  // A subnormal largest key reads as -127 and is clamped; then keys stay below 1.
  int exponent = static_cast<int>(float_to_bits(largest) >> 23) - 127;
  exponent = exponent > 126 ? 126 : (exponent < -126 ? -126 : exponent);
  const F32x8 scale = splat(power_of_two(-exponent));
  for (int64_t i = 0; i < n; i += kLanes) store(keys + i, scale * load(keys + i));
  return exponent;
}

inline core::BFloat16 scaled_bf16(float scale, int exponent) {
  core::BFloat16 out;
  from_float(scale * power_of_two(exponent), out);
  return out;
}

struct LowRankFit {
  // Rows of page_size tokens, head_dim apart.
  alignas(64) float rows[core::kMaxPageSize * core::kMaxHeadDim];
  alignas(64) float vector[core::kMaxHeadDim];
  alignas(64) float codes[core::kMaxHeadDim];
  alignas(64) float weight[core::kMaxPageSize];
  alignas(64) float along[core::kMaxPageSize];  // of whole vectors of tokens, zeros behind the last
};

// vector = sum over the tokens of along[t] * rows[t]
inline void weighted_sum(const LowRankFit& fit, int64_t page_size, int64_t head_dim, float* vector) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    F32x8 sum = splat(0.0F);
    for (int64_t t = 0; t < page_size; ++t) sum += splat(fit.along[t]) * load(fit.rows + t * head_dim + d);
    store(vector + d, sum);
  }
}

// The quantised rank-1 fit of `residual` [page_size, head_dim]: fit.codes, fit.along (the coefficients'
// codes), and the scale, which is returned. Takes the fit off the residual.
inline float fit_one_rank(float* residual, int64_t page_size, int64_t head_dim, LowRankFit& fit) {
  float longest = 0.0F;
  int64_t start = 0;
  for (int64_t t = 0; t < page_size; ++t) {
    float* row = fit.rows + t * head_dim;
    F32x8 squares = splat(0.0F);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const F32x8 x = splat(fit.weight[t]) * load(residual + t * head_dim + d);
      store(row + d, x);
      squares += x * x;
    }
    const float length = __builtin_sqrtf(horizontal_sum(squares));
    if (length > longest) {
      longest = length;
      start = t;
    }
  }
  const size_t row_bytes = static_cast<size_t>(head_dim) * sizeof(float);
  if (longest >= kNoise) {
    __builtin_memcpy(fit.vector, fit.rows + start * head_dim, row_bytes);
    for (int i = 0; i < kNumPowerIterations; ++i) {
      const float length = __builtin_sqrtf(dot(fit.vector, fit.vector, head_dim));
      const float inverse = length > 0.0F ? 1.0F / length : 0.0F;
      for (int64_t t = 0; t < page_size; ++t) {
        fit.along[t] = inverse * dot(fit.rows + t * head_dim, fit.vector, head_dim);
      }
      weighted_sum(fit, page_size, head_dim, fit.vector);
    }
  } else {
    __builtin_memset(fit.vector, 0, row_bytes);
  }
  quantise(fit.vector, head_dim, largest_magnitude(fit.vector, head_dim) / kMaxInt4Code, kMaxInt4Code,
           fit.codes);
  const float length = dot(fit.codes, fit.codes, head_dim);
  const float inverse = length > 0.0F ? 1.0F / length : 0.0F;
  for (int64_t t = 0; t < page_size; ++t) {
    fit.along[t] = inverse * dot(residual + t * head_dim, fit.codes, head_dim);
  }
  const int64_t whole = (page_size + kLanes - 1) / kLanes * kLanes;
  for (int64_t t = page_size; t < whole; ++t) fit.along[t] = 0.0F;
  const float scale = round_up_to_bf16(largest_magnitude(fit.along, whole) / kMaxInt4Code);
  quantise(fit.along, whole, scale, kMaxInt4Code, fit.along);
  for (int64_t t = 0; t < page_size; ++t) {
    const F32x8 coefficient = splat(scale * fit.along[t]);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      float* x = residual + t * head_dim + d;
      store(x, load(x) - coefficient * load(fit.codes + d));
    }
  }
  return scale;
}

// keys: [page_size, head_dim], overwritten; summary: one row of scorer.summary_bytes().
inline void fit_low_rank(float* keys, int64_t page_size, int64_t head_dim, const core::Scorer& scorer,
                         uint8_t* summary) {
  const core::LowRankLayout layout = scorer.low_rank_layout(head_dim, page_size);
  LowRankFit fit;
  core::BFloat16 scales[1 + core::kMaxRank];
  const int exponent = normalise(keys, page_size * head_dim);

  const F32x8 count = splat(static_cast<float>(page_size));
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    F32x8 sum = splat(0.0F);
    for (int64_t t = 0; t < page_size; ++t) sum += load(keys + t * head_dim + d);
    store(fit.vector + d, sum / count);
  }
  const float mean_scale = round_up_to_bf16(largest_magnitude(fit.vector, head_dim) / kMaxMeanCode);
  quantise(fit.vector, head_dim, mean_scale, kMaxMeanCode, fit.codes);
  scales[0] = scaled_bf16(mean_scale, exponent);
  for (int64_t d = 0; d < head_dim; d += kLanes) store_codes(load(fit.codes + d), summary + d);

  float farthest = 0.0F;
  for (int64_t t = 0; t < page_size; ++t) {
    F32x8 squares = splat(0.0F);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const F32x8 centred = load(keys + t * head_dim + d) - load(fit.vector + d);
      store(keys + t * head_dim + d, centred);
      squares += centred * centred;
    }
    fit.weight[t] = __builtin_sqrtf(horizontal_sum(squares));
    farthest = fit.weight[t] > farthest ? fit.weight[t] : farthest;
  }
  for (int64_t t = 0; t < page_size; ++t) {
    const float share = farthest >= kNoise ? fit.weight[t] / farthest : 0.0F;
    fit.weight[t] = share * __builtin_sqrtf(share);
  }

  for (int r = 0; r < scorer.rank; ++r) {
    scales[1 + r] = scaled_bf16(fit_one_rank(keys, page_size, head_dim, fit), exponent);
    pack_int4(fit.codes, head_dim, summary + layout.basis + r * layout.basis_bytes);
    pack_int4(fit.along, page_size, summary + layout.coefficients + r * layout.coefficient_bytes);
  }
  __builtin_memcpy(summary + layout.scales, scales, static_cast<size_t>(1 + scorer.rank) * sizeof(scales[0]));
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
