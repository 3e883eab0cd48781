// Decode attention over bf16 pages by bf16 queries where the CPU multiplies pairs of bf16 and adds them up in
// fp32 (AVX512-BF16): an instruction does twice the products of fp32, and nothing has to be widened.
// Queries are not scaled but their logits, so products are exact. Probabilities are rounded to bf16, and what
// the rounding adds to their sum is taken back: they still add up to 1. The instructions read denormals as 0.
#pragma once

#if defined(__AVX512BF16__)

#include "core/params.h"
#include "cpu/bf16_products.h"
#include "cpu/page_block.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Asks for a cache line to come; where there is little to compute meanwhile once more, since then many are
// dropped.
template <int kHeads>
inline void prefetch_line(Ahead<BFloat16> line) {
  prefetch(line);
  if constexpr (kHeads <= 2) prefetch(line + 16);
}

// --- logits ----------------------------------------------------------------------------------------

// logits[g * stride + t] = sm_scale * dot(q_g, k_t) for up to sixteen tokens of a channel-major page, of
// which num_tokens exist. kContiguous: there are sixteen, and one channel follows the other.
template <int kHeads, bool kContiguous>
[[gnu::always_inline]] inline void sixteen_bf16_logits(const BFloat16* q, const BFloat16* keys,
                                                       Ahead<BFloat16> next, int64_t channel_stride,
                                                       int64_t num_tokens, int64_t head_dim, float sm_scale,
                                                       float* logits, int64_t stride) {
  constexpr int kDepth = kHeads <= 2 ? 4 : 2;  // as in sixteen_token_logits(), in pairs of channels
  const auto tokens = static_cast<__mmask16>(first_lanes(num_tokens));
  __m512 sum[kDepth][kHeads];
  for (int c = 0; c < kDepth; ++c) {
    for (int g = 0; g < kHeads; ++g) sum[c][g] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < head_dim; d += 2 * kDepth) {
    for (int c = 0; c < kDepth; ++c) {
      prefetch_line<kHeads>(next);
      __m512i channels;
      if constexpr (kContiguous) {
        channels = _mm512_loadu_si512(keys);
      } else {
        channels = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi16(tokens, keys)),
                                      _mm256_maskz_loadu_epi16(tokens, keys + channel_stride), 1);
      }
      const __m512i pairs = pair_up(channels);
      for (int g = 0; g < kHeads; ++g) {
        sum[c][g] = add_pairs(sum[c][g], pairs, splat_pair(q + g * head_dim + d + 2 * c));
      }
      keys += 2 * channel_stride;
      next += 2 * channel_stride;
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int c = 1; c < kDepth; ++c) sum[0][g] += sum[c][g];
    const auto scaled = reinterpret_cast<F32x16>(sum[0][g] * sm_scale);
    store(logits + g * stride, low_half(scaled));
    if (num_tokens > kLanes) store(logits + g * stride + kLanes, high_half(scaled));
  }
}

template <int kHeads>
inline void token_major_bf16_logits(const BFloat16* q, const BFloat16* keys, int64_t token_stride,
                                    int64_t page_size, int64_t head_dim, float sm_scale, float* logits,
                                    int64_t stride) {
  for (int64_t t = 0; t < page_size; ++t, keys += token_stride) {
    __m512 sum[kHeads];
    for (int g = 0; g < kHeads; ++g) sum[g] = _mm512_setzero_ps();
    for (int64_t d = 0; d < head_dim; d += 32) {
      const __mmask32 channels = first_lanes(head_dim - d);
      const __m512i k = _mm512_maskz_loadu_epi16(channels, keys + d);
      for (int g = 0; g < kHeads; ++g) {
        sum[g] = add_pairs(sum[g], k, _mm512_maskz_loadu_epi16(channels, q + g * head_dim + d));
      }
    }
    for (int g = 0; g < kHeads; ++g) logits[g * stride + t] = sm_scale * _mm512_reduce_add_ps(sum[g]);
  }
}

// --- values ----------------------------------------------------------------------------------------

// The sums of up to 32 channels, of which n (a multiple of eight) exist. Unpacking two tokens gives channels
// 0..3, 8..11, 16..19, 24..27, then the others; so they lie in memory, without gaps, until in_order().
struct ChannelSums {
  __m512 first;
  __m512 last;

  static ChannelSums load(const float* p, int64_t n) {
    const auto lanes = static_cast<__mmask16>(first_lanes(n / 2));
    return {_mm512_maskz_loadu_ps(lanes, p), _mm512_maskz_loadu_ps(lanes, p + n / 2)};
  }
  void store(float* p, int64_t n) const {
    const auto lanes = static_cast<__mmask16>(first_lanes(n / 2));
    _mm512_mask_storeu_ps(p, lanes, first);
    _mm512_mask_storeu_ps(p + n / 2, lanes, last);
  }
  void store_in_order(float* p, int64_t n) const {
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __mmask32 lanes = first_lanes(n);
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lanes), _mm512_permutex2var_ps(first, order, last));
    _mm512_mask_storeu_ps(p + 16, static_cast<__mmask16>(lanes >> 16),
                          _mm512_permutex2var_ps(first, order | _mm512_set1_epi32(8), last));
  }
};

// acc[g] += sum over the slots [first_slot, end_slot), of which there are some, of weights[g] * v for
// kBlocks times block_channels channels.
template <int kHeads, int kBlocks>
[[gnu::always_inline]] inline void add_bf16_channels(const BFloat16* weights, int64_t stride,
                                                     const BFloat16* values, Ahead<BFloat16> next,
                                                     int64_t token_stride, int64_t first_slot,
                                                     int64_t end_slot, int64_t block_channels,
                                                     int64_t head_dim, float* acc) {
  ChannelSums sum[kHeads][kBlocks];
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < kBlocks; ++i) {
      sum[g][i] = ChannelSums::load(acc + g * head_dim + i * 32, block_channels);
    }
  }
  const __mmask32 channels = first_lanes(block_channels);
  const auto add_slots = [&](int64_t t, __mmask32 first, __mmask32 second) __attribute__((always_inline)) {
    __m512i pairs[kBlocks][2];
    for (int i = 0; i < kBlocks; ++i) {
      const int64_t at = t * token_stride + i * 32;
      prefetch_line<kHeads>(next + at);
      prefetch_line<kHeads>(next + at + token_stride);
      const __m512i a = _mm512_maskz_loadu_epi16(first, values + at);
      const __m512i b = _mm512_maskz_loadu_epi16(second, values + at + token_stride);
      pairs[i][0] = _mm512_unpacklo_epi16(a, b);
      pairs[i][1] = _mm512_unpackhi_epi16(a, b);
    }
    for (int g = 0; g < kHeads; ++g) {
      const __m512i weight = splat_pair(weights + g * stride + t);
      for (int i = 0; i < kBlocks; ++i) {
        sum[g][i].first = add_pairs(sum[g][i].first, pairs[i][0], weight);
        sum[g][i].last = add_pairs(sum[g][i].last, pairs[i][1], weight);
      }
    }
  };
  // Pairs of slots begin at even ones, where a page's weights do. Slots outside count as 0, whatever they
  // hold.
  int64_t t = first_slot / 2 * 2;
  if (t < first_slot) {
    add_slots(t, 0, channels);
    t += 2;
  }
  for (; t + 2 <= end_slot; t += 2) add_slots(t, channels, channels);
  if (t < end_slot) add_slots(t, channels, 0);
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < kBlocks; ++i) sum[g][i].store(acc + g * head_dim + i * 32, block_channels);
  }
}

// --- the way of attend_pages.cpp to multiply -------------------------------------------------------

struct BFloat16Products {
  using Element = BFloat16;

  alignas(64) BFloat16 q[kHeadBlock * core::kMaxHeadDim];
  alignas(64) BFloat16 weights[kHeadBlock * kMaxChunkTokens + 8];
  float correction[kHeadBlock];  // the sum of the numerators over that of their roundings

  template <int kHeads>
  void load_queries(const core::AttendPagesParams& params, int64_t row, int64_t head) {
    for (int g = 0; g < kHeads; ++g) {
      const auto* from = static_cast<const BFloat16*>(params.q.data) + row * params.q.token_stride +
                         (head + g) * params.q.head_stride;
      __builtin_memcpy(q + g * params.head_dim, from,
                       static_cast<size_t>(params.head_dim) * sizeof(BFloat16));
    }
  }

  template <int kHeads>
  void logits(const core::AttendPagesParams& params, Block<BFloat16> keys, Next<BFloat16> next, float* to,
              int64_t stride) const {
    const core::PagePoolView& pool = params.k_pages;
    const int64_t page_size = params.page_size, head_dim = params.head_dim;
    if (!pool.channel_major()) {
      token_major_bf16_logits<kHeads>(q, keys.data, pool.token_stride, page_size, head_dim, params.sm_scale,
                                      to, stride);
    } else if (page_size == 16 && pool.channel_stride == 16) {
      sixteen_bf16_logits<kHeads, true>(q, keys.data, next.data(), 16, 16, head_dim, params.sm_scale, to,
                                        stride);
    } else {
      for (int64_t t = 0; t < page_size; t += 16) {
        sixteen_bf16_logits<kHeads, false>(q, keys.data + t, next.data() + t, pool.channel_stride,
                                           page_size - t, head_dim, params.sm_scale, to + t, stride);
      }
    }
  }

  template <int kHeads>
  void take_weights(const float* logits, int64_t stride, float* maxima, float* sums) {
    for (int g = 0; g < kHeads; ++g) {
      maxima[g] = largest_logit(logits + g * stride, stride);
      const NumeratorSums sum =
          round_numerators(logits + g * stride, stride, maxima[g], weights + g * stride);
      sums[g] = sum.exact;
      correction[g] = sum.rounded == 0.0F ? 0.0F : sum.exact / sum.rounded;
    }
  }

  template <int kHeads>
  void add_values(const core::AttendPagesParams& params, Block<BFloat16> values, Next<BFloat16> next,
                  int64_t first_weight, int64_t stride, int64_t first_slot, int64_t end_slot,
                  float* acc) const {
    if (first_slot >= end_slot) return;
    constexpr int kBlocks = kHeads <= 2 ? 4 : 2;
    const int64_t head_dim = params.head_dim;
    const auto add = [&](auto blocks, int64_t d, int64_t block_channels) __attribute__((always_inline)) {
      add_bf16_channels<kHeads, decltype(blocks)::value>(
          weights + first_weight, stride, values.data + d, next.data() + d, params.v_pages.token_stride,
          first_slot, end_slot, block_channels, head_dim, acc + d);
    };
    int64_t d = 0;
    for (; d + 32 * kBlocks <= head_dim; d += 32 * kBlocks)
      add(std::integral_constant<int, kBlocks>{}, d, 32);
    for (; d + 64 <= head_dim; d += 64) add(std::integral_constant<int, 2>{}, d, 32);
    for (; d < head_dim; d += 32)
      add(std::integral_constant<int, 1>{}, d, head_dim - d < 32 ? head_dim - d : 32);
  }

  void finish(int g, float* acc, int64_t head_dim) const {
    for (int64_t d = 0; d < head_dim; d += 32) {
      const int64_t n = head_dim - d < 32 ? head_dim - d : 32;
      ChannelSums sums = ChannelSums::load(acc + d, n);
      sums.first *= correction[g];
      sums.last *= correction[g];
      sums.store_in_order(acc + d, n);
    }
  }
};

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET

#endif
