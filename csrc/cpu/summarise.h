// The summary of one full page and kv head (layout: core/scorer.h), here of the scorers that are linear in a
// feature of the query; low_rank_fit.h has the other kind. NaN keys are ignored by max and min,
// so a bound stays one for the other keys; infinite keys are clamped to the largest finite value of the
// summary's type, so that no infinity meets a zero in the score.
#pragma once

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "core/scorer.h"
#include "cpu/codes.h"
#include "cpu/low_rank_fit.h"
#include "cpu/page_keys.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline float clamp_to_finite(float x, float largest) {
  if (x != x) return 0.0F;
  return x > largest ? largest : (x < -largest ? -largest : x);
}

inline float largest_finite(const core::Scorer& scorer) {
  if (scorer.encoding == core::SummaryEncoding::kInt8) return kLargestFloat;
  if (scorer.full_type == core::ElementType::kFloat16) return 65504.0F;
  if (scorer.full_type == core::ElementType::kBFloat16) return 3.38953139e+38F;
  return kLargestFloat;
}

// Smallest scale whose 127th multiple reaches `amax`.
inline float code_scale(float amax) {
  if (!(amax > 0.0F)) return 0.0F;
  float scale = amax / 127.0F;
  while (scale * 127.0F < amax) scale = bits_to_float(float_to_bits(scale) + 1);
  return scale;
}

// int8 codes such that scale * code bounds the value from above (kMax), from below (kMin), or is the nearest.
// The quotient's rounding may leave the nearest code two short of a bound, never more.
inline F32x8 encode(F32x8 values, float scale, core::PageStatistic statistic) {
  if (scale == 0.0F) return splat(0.0F);
  F32x8 codes = nearest_code(values / splat(scale), 127.0F);
  const F32x8 one = splat(1.0F);
  for (int step = 0; step < 2; ++step) {
    const F32x8 restored = splat(scale) * codes;
    if (statistic == core::PageStatistic::kMax) {
      codes += select((restored < values) & (codes < splat(127.0F)), one, splat(0.0F));
    } else if (statistic == core::PageStatistic::kMin) {
      codes -= select((restored > values) & (codes > splat(-127.0F)), one, splat(0.0F));
    }
  }
  return codes;
}

// One statistic of eight channels over the tokens. keys: the first of the channels, [page_size, head_dim].
inline F32x8 page_statistic(const float* keys, int64_t page_size, int64_t head_dim,
                            core::PageStatistic statistic) {
  if (statistic == core::PageStatistic::kMax || statistic == core::PageStatistic::kMin) {
    const F32x8 sign = splat(statistic == core::PageStatistic::kMax ? 1.0F : -1.0F);
    F32x8 extreme = splat(__builtin_nanf(""));
    for (int64_t t = 0; t < page_size; ++t) {
      const F32x8 x = sign * load(keys + t * head_dim);
      extreme = select((x > extreme) | (extreme != extreme), x, extreme);
    }
    return sign * extreme;
  }
  const F32x8 count = splat(static_cast<float>(page_size));
  F32x8 sum = splat(0.0F);
  for (int64_t t = 0; t < page_size; ++t) sum += load(keys + t * head_dim);
  const F32x8 mean = sum / count;
  if (statistic == core::PageStatistic::kMean) return mean;
  F32x8 squares = splat(0.0F);
  for (int64_t t = 0; t < page_size; ++t) {
    const F32x8 centred = load(keys + t * head_dim) - mean;
    squares += centred * centred;
  }
  const F32x8 variance = squares / count;
  F32x8 deviation;
  for (int i = 0; i < kLanes; ++i) deviation[i] = __builtin_sqrtf(variance[i]);
  return deviation;
}

// The vectors of a linear scorer. keys: [page_size, head_dim].
inline void summarise_vectors(const float* keys, int64_t page_size, int64_t head_dim,
                              const core::Scorer& scorer, uint8_t* summary) {
  float values[core::kMaxHeadDim];
  const int64_t header_bytes = scorer.header_bytes();
  const float largest = largest_finite(scorer);
  __builtin_memset(summary, 0, static_cast<size_t>(header_bytes));
  for (int v = 0; v < scorer.num_vectors; ++v) {
    const core::PageStatistic statistic = scorer.vectors[v].statistic;
    float amax = 0.0F;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(values + d, page_statistic(keys + d, page_size, head_dim, statistic));
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      values[d] = clamp_to_finite(values[d], largest);
      const float magnitude = __builtin_fabsf(values[d]);
      if (magnitude > amax) amax = magnitude;
    }
    uint8_t* codes = summary + header_bytes + v * head_dim * scorer.code_bytes();
    if (scorer.encoding == core::SummaryEncoding::kFull) {
      dispatch_element(scorer.full_type, [&](auto* tag) {
        auto* full = reinterpret_cast<decltype(tag)>(codes);
        for (int64_t d = 0; d < head_dim; ++d) from_float(values[d], full[d]);
      });
      continue;
    }
    const float scale = code_scale(amax);
    __builtin_memcpy(summary + 4 * v, &scale, 4);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store_codes(encode(load(values + d), scale, statistic), codes + d);
    }
  }
}

// keys: [page_size, head_dim] of a full page, fp32, may be overwritten; summary: one row of
// scorer.summary_bytes().
inline void summarise(float* keys, int64_t page_size, int64_t head_dim, const core::Scorer& scorer,
                      uint8_t* summary) {
  const int64_t used_bytes = scorer.used_bytes(head_dim, page_size);
  __builtin_memset(summary + used_bytes, 0,
                   static_cast<size_t>(scorer.summary_bytes(head_dim, page_size) - used_bytes));
  if (scorer.linear()) {
    summarise_vectors(keys, page_size, head_dim, scorer, summary);
  } else {
    fit_low_rank(keys, page_size, head_dim, scorer, summary);
  }
}

inline void summarise_page(const core::PagePoolView& pool, int64_t page_id, int64_t head, int64_t page_size,
                           int64_t head_dim, const core::Scorer& scorer, uint8_t* summary) {
  alignas(64) float keys[core::kMaxPageSize * core::kMaxHeadDim];
  load_page_keys(pool, page_id, head, page_size, head_dim, keys);
  summarise(keys, page_size, head_dim, scorer, summary);
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
