// Prefill of bf16 queries over bf16 tokens where the CPU multiplies pairs of bf16 (AVX512-BF16), under the
// conditions of bf16_page.h: queries unscaled, weights rounded, sums in fp32.
#pragma once

#if defined(__AVX512BF16__)

#include "core/limits.h"
#include "core/params.h"
#include "cpu/bf16_products.h"
#include "cpu/prefill_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

class BFloat16Tile {
 public:
  static bool serves(const core::PrefillAttentionParams& params) {
    for (const core::ElementType type :
         {params.q.type, params.k.type, params.v.type, params.k_pages.type, params.v_pages.type}) {
      if (type != core::ElementType::kBFloat16) return false;
    }
    return true;
  }

  void load_query(const core::PrefillAttentionParams& params, int64_t row, int64_t query_head,
                  int64_t query) {
    __builtin_memcpy(q_ + query * params.head_dim, token_of(params.q, row, query_head),
                     static_cast<size_t>(params.head_dim) * sizeof(BFloat16));
  }

  void load(const core::PrefillAttentionParams& params, const core::PrefillBlock& block, int64_t head,
            int64_t begin, int64_t end) {
    const int64_t head_dim = params.head_dim;
    const core::PagePoolView &k = params.k_pages, &v = params.v_pages;
    const BFloat16* values[kTile + 1] = {};
    for_each_run(
        params, block, begin, end,
        [&](int64_t page_id, int64_t slot, int64_t count, int64_t t) {
          const BFloat16* key = k.page<BFloat16>(page_id, head) + slot * k.token_stride;
          if (k.channel_major()) {
            pair_channels(key, k.channel_stride, count, head_dim, t);
          } else {
            for (int64_t i = 0; i < count; ++i) pair_channels_of(key + i * k.token_stride, head_dim, t + i);
          }
          const BFloat16* value = v.page<BFloat16>(page_id, head) + slot * v.token_stride;
          for (int64_t i = 0; i < count; ++i) values[t + i] = value + i * v.token_stride;
        },
        [&](int64_t row, int64_t t) {
          pair_channels_of(token_of(params.k, row, head), head_dim, t);
          values[t] = token_of(params.v, row, head);
        });
    for (int64_t t = 0; t < end - begin; t += 2) pair_tokens(values[t], values[t + 1], head_dim, t);
  }

  template <int kHeads>
  void logits(const core::PrefillAttentionParams& params, int64_t query, int64_t num_slots, float* to) const {
    constexpr int64_t kColumns = 4;  // of sixteen tokens
    static_assert(kTile == kColumns * 16);
    const BFloat16* q = q_ + query * params.head_dim;
    if (num_slots > kTile / 2) {
      column_logits<kHeads, kColumns>(q, 0, params, to);
    } else {
      for (int64_t t = 0; t < num_slots; t += 16) column_logits<kHeads, 1>(q, t, params, to);
    }
  }

  WeightSums take_weights(int g, const float* logits, int64_t num_slots, float max) {
    const NumeratorSums sums = round_numerators(logits, num_slots, max, weights_ + g * kTile);
    return {sums.exact, sums.rounded};
  }

  template <int kHeads>
  void add_values(int g, int64_t begin, int64_t end, int64_t head_dim, float* acc) const {
    if (begin >= end) return;
    int64_t d = 0;
    for (; d + 64 <= head_dim; d += 64) add_columns<kHeads, 4>(g, begin, end, d, 16, head_dim, acc);
    for (; d < head_dim; d += 16) {
      add_columns<kHeads, 1>(g, begin, end, d, head_dim - d < 16 ? head_dim - d : 16, head_dim, acc);
    }
  }

 private:
  static const BFloat16* token_of(const core::PackedView& packed, int64_t row, int64_t head) {
    return static_cast<const BFloat16*>(packed.data) + row * packed.token_stride + head * packed.head_stride;
  }

  // Channels of `count` tokens, from place t on, that lie channel by channel.
  void pair_channels(const BFloat16* keys, int64_t channel_stride, int64_t count, int64_t head_dim,
                     int64_t t) {
    for (int64_t first = 0; first < count; first += 16) {
      const auto tokens = static_cast<__mmask16>(first_lanes(count - first));
      for (int64_t d = 0; d < head_dim; d += 2) {
        const BFloat16* channel = keys + first + d * channel_stride;
        const __m512i pairs = pair_up(_mm256_maskz_loadu_epi16(tokens, channel),
                                      _mm256_maskz_loadu_epi16(tokens, channel + channel_stride));
        _mm512_mask_storeu_epi32(k_ + d / 2 * kTile + t + first, tokens, pairs);
      }
    }
  }

  // Channels of the token at place t, which lie side by side.
  void pair_channels_of(const BFloat16* key, int64_t head_dim, int64_t t) {
    for (int64_t d = 0; d < head_dim; d += 2) {
      __builtin_memcpy(k_ + d / 2 * kTile + t, key + d, sizeof(k_[0]));
    }
  }

  // The values of the tokens at places t and t + 1; the second may be none.
  void pair_tokens(const BFloat16* first, const BFloat16* second, int64_t head_dim, int64_t t) {
    for (int64_t d = 0; d < head_dim; d += 16) {
      const auto channels = static_cast<__mmask16>(first_lanes(head_dim - d));
      const __mmask16 exists = second == nullptr ? __mmask16{0} : channels;
      const __m512i pairs = pair_up(_mm256_maskz_loadu_epi16(channels, first + d),
                                    _mm256_maskz_loadu_epi16(exists, (exists ? second : first) + d));
      _mm512_mask_storeu_epi32(v_ + t / 2 * head_dim + d, channels, pairs);
    }
  }

  // Logits of kColumns times sixteen tokens from place t on; what lies behind the tile's tokens is any
  // number.
  template <int kHeads, int kColumns>
  void column_logits(const BFloat16* q, int64_t t, const core::PrefillAttentionParams& params,
                     float* to) const {
    __m512 sum[kHeads][kColumns];
    for (int g = 0; g < kHeads; ++g) {
      for (int i = 0; i < kColumns; ++i) sum[g][i] = _mm512_setzero_ps();
    }
    const int32_t* keys = k_ + t;
    for (int64_t d = 0; d < params.head_dim; d += 2, keys += kTile) {
      __m512i pairs[kColumns];
      for (int i = 0; i < kColumns; ++i) pairs[i] = _mm512_loadu_si512(keys + i * 16);
      for (int g = 0; g < kHeads; ++g) {
        const __m512i query = splat_pair(q + g * params.head_dim + d);
        for (int i = 0; i < kColumns; ++i) sum[g][i] = add_pairs(sum[g][i], pairs[i], query);
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      for (int i = 0; i < kColumns; ++i) {
        _mm512_storeu_ps(to + g * kTile + t + i * 16, sum[g][i] * params.sm_scale);
      }
    }
  }

  // acc of kColumns times num_channels (up to sixteen) channels from d on.
  template <int kHeads, int kColumns>
  void add_columns(int g0, int64_t begin, int64_t end, int64_t d, int64_t num_channels, int64_t head_dim,
                   float* acc) const {
    const auto channels = static_cast<__mmask16>(first_lanes(num_channels));
    __m512 sum[kHeads][kColumns];
    for (int g = 0; g < kHeads; ++g) {
      for (int i = 0; i < kColumns; ++i) {
        sum[g][i] = _mm512_maskz_loadu_ps(channels, acc + g * head_dim + d + i * 16);
      }
    }
    // A slot outside counts as 0, whatever it holds.
    const auto add = [&](int64_t t, uint32_t slots) __attribute__((always_inline)) {
      __m512i pairs[kColumns];
      for (int i = 0; i < kColumns; ++i) {
        pairs[i] = _mm512_and_si512(_mm512_maskz_loadu_epi32(channels, v_ + t / 2 * head_dim + d + i * 16),
                                    _mm512_set1_epi32(static_cast<int32_t>(slots)));
      }
      for (int g = 0; g < kHeads; ++g) {
        const __m512i weight = splat_pair(weights_ + (g0 + g) * kTile + t);
        for (int i = 0; i < kColumns; ++i) sum[g][i] = add_pairs(sum[g][i], pairs[i], weight);
      }
    };
    int64_t t = begin / 2 * 2;
    if (t < begin) {
      add(t, t + 1 < end ? 0xffff0000 : 0);
      t += 2;
    }
    for (; t + 2 <= end; t += 2) add(t, 0xffffffff);
    if (t < end) add(t, 0x0000ffff);
    for (int g = 0; g < kHeads; ++g) {
      for (int i = 0; i < kColumns; ++i) {
        _mm512_mask_storeu_ps(acc + g * head_dim + d + i * 16, channels, sum[g][i]);
      }
    }
  }

  alignas(64) int32_t k_[core::kMaxHeadDim / 2 * kTile] = {};  // [head_dim / 2, kTile] pairs of channels
  alignas(64) int32_t v_[kTile / 2 * core::kMaxHeadDim];       // [kTile / 2, head_dim] pairs of tokens
  alignas(64) BFloat16 q_[core::kPrefillQueries * core::kMaxHeadDim];
  alignas(64) BFloat16 weights_[kHeadBlock * kTile + 8];
};

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET

#endif
