// The summary of one full page and kv head (layout: core/scorer.h). NaN keys are ignored by max and min,
// so a bound stays one for the other keys; infinite keys are clamped to the largest finite value of the
// summary's type, so that no infinity meets a zero in the score.
#pragma once

#include <type_traits>

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "core/scorer.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline float clamp_magnitude(float x, float largest) {
  return x > largest ? largest : (x < -largest ? -largest : x);
}

inline float largest_finite(const core::Scorer& scorer) {
  if (scorer.quantised) return 3.40282347e+38F;
  switch (scorer.full_type) {
    case core::ElementType::kFloat16:
      return 65504.0F;
    case core::ElementType::kBFloat16:
      return 3.38953139e+38F;
    case core::ElementType::kFloat32:
      break;
  }
  return 3.40282347e+38F;
}

// Smallest scale whose 127th multiple reaches `amax`.
inline float code_scale(float amax) {
  if (!(amax > 0.0F)) return 0.0F;
  float scale = amax / 127.0F;
  while (scale * 127.0F < amax) scale = bits_to_float(float_to_bits(scale) + 1);
  return scale;
}

inline int round_nearest(float x) {
  const float magnitude = __builtin_truncf(__builtin_fabsf(x) + 0.5F);
  return static_cast<int>(x < 0.0F ? -magnitude : magnitude);
}

inline int clamp_code(int code) { return code > 127 ? 127 : (code < -127 ? -127 : code); }

// One int8 code such that scale * code bounds the value from above (kMax), from below (kMin), or is the
// nearest.
inline int8_t encode(float value, float scale, core::PageStatistic statistic) {
  if (scale == 0.0F || value != value) return 0;
  int code = clamp_code(round_nearest(value / scale));
  if (statistic == core::PageStatistic::kMax) {
    while (code < 127 && scale * static_cast<float>(code) < value) ++code;
  } else if (statistic == core::PageStatistic::kMin) {
    while (code > -127 && scale * static_cast<float>(code) > value) --code;
  }
  return static_cast<int8_t>(code);
}

template <typename T>
inline float page_statistic(const T* channel, int64_t token_stride, int64_t page_size,
                            core::PageStatistic statistic) {
  if (statistic == core::PageStatistic::kMax || statistic == core::PageStatistic::kMin) {
    const bool is_max = statistic == core::PageStatistic::kMax;
    float extreme = 0.0F;
    bool found = false;
    for (int64_t t = 0; t < page_size; ++t) {
      const float x = to_float(channel[t * token_stride]);
      if (x != x) continue;
      if (!found || (is_max ? x > extreme : x < extreme)) extreme = x;
      found = true;
    }
    return extreme;
  }
  float sum = 0.0F;
  for (int64_t t = 0; t < page_size; ++t) sum += to_float(channel[t * token_stride]);
  const float mean = sum / static_cast<float>(page_size);
  if (statistic == core::PageStatistic::kMean) return mean;
  float squares = 0.0F;
  for (int64_t t = 0; t < page_size; ++t) {
    const float centred = to_float(channel[t * token_stride]) - mean;
    squares += centred * centred;
  }
  return __builtin_sqrtf(squares / static_cast<float>(page_size));
}

template <typename T>
inline void summarise_page_of(const T* keys, int64_t token_stride, int64_t channel_stride, int64_t page_size,
                              int64_t head_dim, const core::Scorer& scorer, uint8_t* summary) {
  float values[core::kMaxHeadDim];
  const int64_t row_bytes = scorer.summary_bytes(head_dim);
  const int64_t header_bytes = scorer.quantised ? core::kSummaryHeaderBytes : 0;
  const int64_t used_bytes = header_bytes + scorer.num_vectors * head_dim * scorer.code_bytes();
  const float largest = largest_finite(scorer);
  __builtin_memset(summary, 0, static_cast<size_t>(header_bytes));
  __builtin_memset(summary + used_bytes, 0, static_cast<size_t>(row_bytes - used_bytes));
  for (int v = 0; v < scorer.num_vectors; ++v) {
    const core::PageStatistic statistic = scorer.vectors[v].statistic;
    float amax = 0.0F;
    for (int64_t d = 0; d < head_dim; ++d) {
      values[d] = clamp_magnitude(
          page_statistic(keys + d * channel_stride, token_stride, page_size, statistic), largest);
      const float magnitude = __builtin_fabsf(values[d]);
      if (magnitude > amax) amax = magnitude;
    }
    uint8_t* codes = summary + header_bytes + v * head_dim * scorer.code_bytes();
    if (!scorer.quantised) {
      dispatch_element(scorer.full_type, [&](auto* tag) {
        auto* full = reinterpret_cast<decltype(tag)>(codes);
        for (int64_t d = 0; d < head_dim; ++d) from_float(values[d], full[d]);
      });
      continue;
    }
    const float scale = code_scale(amax);
    __builtin_memcpy(summary + 4 * v, &scale, 4);
    for (int64_t d = 0; d < head_dim; ++d) {
      codes[d] = static_cast<uint8_t>(encode(values[d], scale, statistic));
    }
  }
}

inline void summarise_page(const core::PagePoolView& pool, int64_t page_id, int64_t head, int64_t page_size,
                           int64_t head_dim, const core::Scorer& scorer, uint8_t* summary) {
  dispatch_element(pool.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    summarise_page_of<T>(pool.page<T>(page_id, head), pool.token_stride, pool.channel_stride, page_size,
                         head_dim, scorer, summary);
  });
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
