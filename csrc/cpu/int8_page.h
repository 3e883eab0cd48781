// The inner loops of attention over one int8 page, in integers: queries and weighted probabilities are
// rounded to 16-bit codes, so that sums of products with the page's codes are exact and take two
// thirds of the time of fp32 (no conversion; AVX2 adds integers on more ports than it multiplies). A query
// channel is off by at most 2^-16 of the head's largest one, a weight by 2^-16 of the page's largest one; the
// codes of the page itself are off by up to 2^-8 of a row's largest value.
#pragma once

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "cpu/codes.h"
#include "cpu/dot_pairs.h"
#include "cpu/lanes_of_heads.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

static_assert(core::kMaxHeadDim * 128 * 32767 < INT32_MAX, "A dot product of codes fits 32 bits.");
static_assert(core::kMaxPageSize * 128 * 32767 < INT32_MAX, "So does the weighted sum of a page's codes.");

constexpr int64_t round_up_wide(int64_t n) { return (n + kWideLanes - 1) / kWideLanes * kWideLanes; }

// Rounds kHeads rows x [n], n a multiple of 8, to codes: x = scale * code. A row that is not finite has codes
// 0 and scale NaN; numbers in a row without one above 2^-113 count as 0.
template <int kHeads>
[[gnu::always_inline]] inline void round_rows(const float* x, int64_t x_stride, int64_t n, int16_t* codes,
                                              int64_t codes_stride, float* scales) {
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
  store4(inverse, select4(rounds, splat4(32767.0F) / max, splat4(0.0F)));
  const F32x4 not_rounded = select4(max <= splat4(0x1p-113F), splat4(0.0F), splat4(__builtin_nanf("")));
  store4(scales, select4(rounds, max * splat4(1.0F / 32767.0F), not_rounded));
  for (int g = 0; g < kHeads; ++g) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const I32x8 code = nearest_even(load(x + g * x_stride + i) * splat(inverse[g]));
      const I16x8 narrow = __builtin_convertvector(code, I16x8);
      __builtin_memcpy(codes + g * codes_stride + i, &narrow, sizeof(narrow));
    }
  }
}

// The queries of a head block: q = scale * code, zeros behind the last channel up to a multiple of 16.
struct QueryCodes {
  alignas(64) int16_t codes[kHeadBlock][core::kMaxHeadDim];
  alignas(16) float scale[kHeadBlock];

  // q: [kHeads, head_dim]
  template <int kHeads>
  void round(const float* q, int64_t head_dim) {
    round_rows<kHeads>(q, head_dim, head_dim, codes[0], core::kMaxHeadDim, scale);
    for (int g = 0; g < kHeads; ++g) {
      for (int64_t d = head_dim; d < round_up_wide(head_dim); ++d) codes[g][d] = 0;
    }
  }
};

// Where the tile lies that comes next, so that each of its cache lines is asked for once.
struct NextLines {
  const int8_t* line;
  int64_t step;  // from one to the next
};

// The first n codes, zeros behind them: the memory after them may not exist.
inline I8x16 load_columns(const int8_t* p, int64_t n) {
  if (n >= 16) return load_codes(p);
  I8x16 codes = {};
  if (n == 8) {
    __builtin_memcpy(&codes, p, 8);
  } else {
    for (int64_t i = 0; i < n; ++i) codes[i] = p[i];
  }
  return codes;
}

// even[g], odd[g]: over num_rows rows of weights[g][row] * codes[row][column], for up to sixteen columns in
// the order of RowPairs, num_columns of which exist.
template <int kHeads>
[[gnu::always_inline]] inline void sum_rows(const int8_t* codes, int64_t row_stride, int64_t num_rows,
                                            int64_t num_columns, const int16_t* weights,
                                            int64_t weight_stride, NextLines next, I32x8* even_sums,
                                            I32x8* odd_sums) {
  I32x8 even[kHeads], odd[kHeads];
  for (int g = 0; g < kHeads; ++g) even[g] = odd[g] = I32x8{};
  const auto add_pair = [&](I16x16 a, I16x16 b, int64_t row) __attribute__((always_inline)) {
    const RowPairs pairs = interleave(a, b);
    for (int g = 0; g < kHeads; ++g) {
      const I16x16 weight = splat_pair(weights + g * weight_stride + row);
      even[g] = add_dot_pairs(even[g], pairs.even, weight);
      odd[g] = add_dot_pairs(odd[g], pairs.odd, weight);
    }
  };
  int64_t row = 0;
  if (num_columns >= kWideLanes) {
#pragma GCC unroll 1  // unrolled, the sums would be added up in another order, which takes too many registers
    for (; row + 2 <= num_rows; row += 2) {
      prefetch(next.line);
      next.line += next.step;
      add_pair(load_wide(codes), load_wide(codes + row_stride), row);
      codes += 2 * row_stride;
    }
  }
  for (; row < num_rows; row += 2, codes += 2 * row_stride) {
    const I8x16 second = row + 1 < num_rows ? load_columns(codes + row_stride, num_columns) : I8x16{};
    add_pair(widen(load_columns(codes, num_columns)), widen(second), row);
  }
  for (int g = 0; g < kHeads; ++g) {
    even_sums[g] = even[g];
    odd_sums[g] = odd[g];
  }
}

inline F32x8 load_scales(const float* scales, int64_t t, int64_t page_size) {
  return t + kLanes <= page_size ? load(scales + t) : load_first(scales + t, page_size - t);
}

// logits[g * stride + t] = scales[t] * dot(q_g, k_t) for every token of a page.
template <int kHeads>
inline void int8_channel_major_logits(const QueryCodes& q, const int8_t* keys, const int8_t* next,
                                      int64_t channel_stride, const float* scales, int64_t page_size,
                                      int64_t head_dim, float* logits, int64_t stride) {
  for (int64_t t = 0; t < page_size; t += kWideLanes) {
    I32x8 even[kHeads], odd[kHeads];
    sum_rows<kHeads>(keys + t, channel_stride, head_dim, page_size - t, q.codes[0], core::kMaxHeadDim,
                     {next + 2 * t, 2 * channel_stride}, even, odd);
    const bool wide = t + kLanes < page_size;
    const F32x8 first_scale = load_scales(scales, t, page_size);
    const F32x8 last_scale = wide ? load_scales(scales, t + kLanes, page_size) : splat(0.0F);
    for (int g = 0; g < kHeads; ++g) {
      // Dot products first, the tokens' scales later: a large scale times a code may overflow.
      const F32x16 dots = restore_columns(__builtin_convertvector(even[g], F32x8) * splat(q.scale[g]),
                                          __builtin_convertvector(odd[g], F32x8) * splat(q.scale[g]));
      float* token = logits + g * stride + t;
      store(token, dots.lanes[0] * first_scale);
      if (wide) store(token + kLanes, dots.lanes[1] * last_scale);
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
      for (int g = 0; g < kHeads; ++g) sum[g] = add_dot_pairs(sum[g], k, load_wide(q.codes[g] + d));
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
                        const float* scales, const int8_t* next, int64_t page_size, int64_t head_dim,
                        float* logits, int64_t stride) {
  if (pool.channel_major()) {
    int8_channel_major_logits<kHeads>(q, keys, next, pool.channel_stride, scales, page_size, head_dim, logits,
                                      stride);
  } else {
    int8_token_major_logits<kHeads>(q, keys, pool.token_stride, scales, page_size, head_dim, logits, stride);
  }
}

// acc[g] += sum over the slots [first_slot, end_slot) of a page of probabilities[g] * scales * v. Slots
// outside are read with weight 0, whatever they hold. `acc` is in the order of RowPairs until
// restore_int8_channels().
template <int kHeads>
inline void accumulate_int8_values(const float* probabilities, int64_t stride, const int8_t* values,
                                   const int8_t* next, int64_t token_stride, const float* scales,
                                   int64_t first_slot, int64_t end_slot, int64_t page_size, int64_t head_dim,
                                   float* acc) {
  alignas(64) float weights[kHeads][core::kMaxPageSize];
  alignas(64) int16_t codes[kHeads][core::kMaxPageSize];
  alignas(16) float scale[kHeadBlock];
  const int64_t slots = round_up(page_size);
  for (int64_t t = 0; t < slots; t += kLanes) {
    const I32x8 slot = I32x8{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<int32_t>(t);
    const I32x8 seen = (slot >= static_cast<int32_t>(first_slot)) & (slot < static_cast<int32_t>(end_slot));
    const F32x8 slot_scales = select(seen, load_scales(scales, t, page_size), splat(0.0F));
    for (int g = 0; g < kHeads; ++g)
      store(weights[g] + t, load(probabilities + g * stride + t) * slot_scales);
  }
  round_rows<kHeads>(weights[0], core::kMaxPageSize, slots, codes[0], core::kMaxPageSize, scale);
  const int64_t first_row = first_slot / 2 * 2;
  const int64_t end_row = end_slot + end_slot % 2 < page_size ? end_slot + end_slot % 2 : page_size;
  for (int64_t d = 0; d < head_dim; d += kWideLanes) {
    // Four blocks of sixteen channels make a line: each pair of blocks asks for it in every other row.
    const int64_t line = first_row + d / 32 % 2;
    I32x8 even[kHeads], odd[kHeads];
    sum_rows<kHeads>(values + first_row * token_stride + d, token_stride, end_row - first_row, head_dim - d,
                     codes[0] + first_row, core::kMaxPageSize,
                     {next + line * token_stride + d / 64 * 64, 2 * token_stride}, even, odd);
    for (int g = 0; g < kHeads; ++g) {
      const F32x8 unit = splat(scale[g]);
      const F32x16 sum = {unit * __builtin_convertvector(even[g], F32x8),
                          unit * __builtin_convertvector(odd[g], F32x8)};
      float* channels = acc + g * head_dim + d;
      if (d + kWideLanes <= head_dim) {
        store(channels, load(channels) + sum.lanes[0]);
        store(channels + kLanes, load(channels + kLanes) + sum.lanes[1]);
      } else {
        store(channels, load(channels) + restore_columns(sum.lanes[0], sum.lanes[1]).lanes[0]);
      }
    }
  }
}

inline void restore_int8_channels(float* acc, int64_t head_dim) {
  for (int64_t d = 0; d + kWideLanes <= head_dim; d += kWideLanes) {
    const F32x16 x = restore_columns(load(acc + d), load(acc + d + kLanes));
    store(acc + d, x.lanes[0]);
    store(acc + d + kLanes, x.lanes[1]);
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
