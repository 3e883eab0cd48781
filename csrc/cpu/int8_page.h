// The inner loops of attention over one int8 page, in integers: queries and weighted probabilities are
// rounded to 16-bit codes, so that sums of products with the page's codes are exact and take two
// thirds of the time of fp32 (no conversion; AVX2 adds integers on more ports than it multiplies). A query
// channel is off by at most 2^-16 of the head's largest one, a weight by 2^-16 of the page's largest one; the
// codes of the page itself are off by up to 2^-8 of a row's largest value.
#pragma once

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "cpu/code_rows.h"
#include "cpu/codes.h"
#include "cpu/lanes_of_heads.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

static_assert(core::kMaxHeadDim * 128 * 32767 < INT32_MAX, "A dot product of codes fits 32 bits.");
static_assert(core::kMaxPageSize * 128 * 32767 < INT32_MAX, "So does the weighted sum of a page's codes.");

constexpr int64_t round_up_wide(int64_t n) { return (n + kWideLanes - 1) / kWideLanes * kWideLanes; }

// Rounds kHeads rows x [n], n a multiple of 8, to codes: x = scale * code. A row that is not finite has codes
// 0 and scale NaN; numbers in a row without one above 2^-113 count as 0.
template <int kHeads, typename Weights>
[[gnu::always_inline]] inline void round_rows(const float* x, int64_t x_stride, int64_t n, Weights* weights,
                                              float* scales) {
  typedef int16_t I16x8 __attribute__((vector_size(16)));
  // Without the sign, floats are ordered as integers are, and NaN comes last.
  const auto larger = [](auto a, auto b) { return a > b ? a : b; };
  I32x8 largest[kHeads];
  for (int g = 0; g < kHeads; ++g) {
    largest[g] = I32x8{};
    for (int64_t i = 0; i < n; i += kLanes) {
      largest[g] = larger(largest[g], reinterpret_cast<I32x8>(load(x + g * x_stride + i)) & INT32_MAX);
    }
  }
  const auto max = reinterpret_cast<F32x4>(reduce_heads<kHeads>(largest, larger));
  const I32x4 rounds = (max > splat4(0x1p-113F)) & (max < splat4(__builtin_inff()));
  alignas(16) float inverse[kHeadBlock];
  store4(inverse, select4(rounds, splat4(kLargestWeight) / max, splat4(0.0F)));
  const F32x4 not_rounded = select4(max <= splat4(0x1p-113F), splat4(0.0F), splat4(__builtin_nanf("")));
  store4(scales, select4(rounds, max * splat4(1.0F / kLargestWeight), not_rounded));
  for (int g = 0; g < kHeads; ++g) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const I32x8 code = nearest_even(load(x + g * x_stride + i) * splat(inverse[g]));
      const I16x8 narrow = __builtin_convertvector(code, I16x8);
      __builtin_memcpy(weights[g].codes + i, &narrow, sizeof(narrow));
    }
    weights[g].prepare(n);
  }
}

// The queries of a head block: q = scale * code, zeros behind the last channel up to a multiple of 16.
struct QueryCodes {
  RowWeights<core::kMaxHeadDim> channels[kHeadBlock];
  alignas(16) float scale[kHeadBlock];

  // q: [kHeads, head_dim]
  template <int kHeads>
  void round(const float* q, int64_t head_dim) {
    round_rows<kHeads>(q, head_dim, head_dim, channels, scale);
    for (int g = 0; g < kHeads; ++g) {
      for (int64_t d = head_dim; d < round_up_wide(head_dim); ++d) channels[g].codes[d] = 0;
    }
  }
};

inline F32x8 load_scales(const float* scales, int64_t t, int64_t page_size) {
  return t + kLanes <= page_size ? load(scales + t) : load_first(scales + t, page_size - t);
}

// logits[g * stride + t] = scales[t] * dot(q_g, k_t) for every token of a page.
template <int kHeads>
inline void int8_channel_major_logits(const QueryCodes& q, const int8_t* keys, Ahead<int8_t> next,
                                      int64_t channel_stride, const float* scales, int64_t page_size,
                                      int64_t head_dim, float* logits, int64_t stride) {
  for (int64_t t = 0; t < page_size; t += kWideLanes) {
    F32x16 dots[kHeads];
    sum_rows<kHeads>(keys + t, channel_stride, 0, head_dim, page_size - t, q.channels,
                     {next + kRowsPerDot * t, kRowsPerDot * channel_stride}, dots);
    const bool wide = t + kLanes < page_size;
    const F32x8 first_scale = load_scales(scales, t, page_size);
    const F32x8 last_scale = wide ? load_scales(scales, t + kLanes, page_size) : splat(0.0F);
    for (int g = 0; g < kHeads; ++g) {
      // Dot products first, the tokens' scales later: a large scale times a code may overflow.
      const F32x16 scaled = splat16(q.scale[g]) * in_column_order(dots[g]);
      float* token = logits + g * stride + t;
      store(token, low_half(scaled) * first_scale);
      if (wide) store(token + kLanes, high_half(scaled) * last_scale);
    }
  }
}

template <int kHeads>
inline void int8_token_major_logits(const QueryCodes& q, const int8_t* keys, int64_t token_stride,
                                    const float* scales, int64_t page_size, int64_t head_dim, float* logits,
                                    int64_t stride) {
  for (int64_t t = 0; t < page_size; ++t) {
    I32x8 sum[kHeads] = {};
    for (int64_t d = 0; d < head_dim; d += kWideLanes) {
      const I16x16 k = widen(load_columns(keys + t * token_stride + d, head_dim - d));
      for (int g = 0; g < kHeads; ++g) sum[g] = add_dot_pairs(sum[g], k, load_wide(q.channels[g].codes + d));
    }
    for (int g = 0; g < kHeads; ++g) {
      int32_t dot = 0;
      for (int lane = 0; lane < kLanes; ++lane) dot += sum[g][lane];
      logits[g * stride + t] = static_cast<float>(dot) * q.scale[g] * scales[t];
    }
  }
}

template <int kHeads>
inline void int8_logits(const QueryCodes& q, const core::PagePoolView& pool, const int8_t* keys,
                        const float* scales, Ahead<int8_t> next, int64_t page_size, int64_t head_dim,
                        float* logits, int64_t stride) {
  if (pool.channel_major()) {
    int8_channel_major_logits<kHeads>(q, keys, next, pool.channel_stride, scales, page_size, head_dim, logits,
                                      stride);
  } else {
    int8_token_major_logits<kHeads>(q, keys, pool.token_stride, scales, page_size, head_dim, logits, stride);
  }
}

// acc[g] += sum over the slots [first_slot, end_slot) of a page of probabilities[g] * scales * v. Slots
// outside are read with weight 0, whatever they hold. `acc` is in an order of its own until
// restore_int8_channels().
template <int kHeads>
inline void accumulate_int8_values(const float* probabilities, int64_t stride, const int8_t* values,
                                   Ahead<int8_t> next, int64_t token_stride, const float* scales,
                                   int64_t first_slot, int64_t end_slot, int64_t page_size, int64_t head_dim,
                                   float* acc) {
  alignas(64) float weights[kHeads][core::kMaxPageSize];
  RowWeights<core::kMaxPageSize> slot_weights[kHeads];
  alignas(16) float scale[kHeadBlock];
  const int64_t slots = round_up(page_size);
  for (int64_t t = 0; t < slots; t += kLanes) {
    const I32x8 slot = I32x8{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<int32_t>(t);
    const I32x8 seen = (slot >= static_cast<int32_t>(first_slot)) & (slot < static_cast<int32_t>(end_slot));
    const F32x8 slot_scales = select(seen, load_scales(scales, t, page_size), splat(0.0F));
    for (int g = 0; g < kHeads; ++g)
      store(weights[g] + t, load(probabilities + g * stride + t) * slot_scales);
  }
  round_rows<kHeads>(weights[0], core::kMaxPageSize, slots, slot_weights, scale);
  // Rows are taken kRowsPerDot at a time, from a multiple of it on; the weights outside are 0.
  const int64_t first_row = first_slot / kRowsPerDot * kRowsPerDot;
  const int64_t last_rows = (end_slot + kRowsPerDot - 1) / kRowsPerDot * kRowsPerDot;
  const int64_t end_row = last_rows < page_size ? last_rows : page_size;
  for (int64_t d = 0; d < head_dim; d += kWideLanes) {
    // Four blocks of sixteen channels make a line: the blocks take turns in asking for it, row by row.
    const int64_t line = first_row + d / (64 / kRowsPerDot) % kRowsPerDot;
    const NextLines next_lines = {next + line * token_stride + d / 64 * 64, kRowsPerDot * token_stride};
    const int8_t* rows = values + first_row * token_stride + d;
    F32x16 sums[kHeads];
    sum_rows<kHeads>(rows, token_stride, first_row, end_row - first_row, head_dim - d, slot_weights,
                     next_lines, sums);
    for (int g = 0; g < kHeads; ++g) {
      const F32x16 sum = splat16(scale[g]) * sums[g];
      float* channels = acc + g * head_dim + d;
      if (d + kWideLanes <= head_dim) {
        store(channels, load(channels) + low_half(sum));
        store(channels + kLanes, load(channels + kLanes) + high_half(sum));
      } else {
        store(channels, load(channels) + low_half(in_column_order(sum)));
      }
    }
  }
}

// Ends the order in which accumulate_int8_values left one head's sums.
inline void restore_int8_channels(float* acc, int64_t head_dim) {
  if constexpr (kColumnsInOrder) return;
  for (int64_t d = 0; d + kWideLanes <= head_dim; d += kWideLanes) {
    store(acc + d, in_column_order(load16(acc + d)));
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
