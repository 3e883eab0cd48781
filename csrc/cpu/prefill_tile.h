// The keys and values of a few tokens in the form in which prefill multiplies them, made once for all queries
// of a block, and the queries themselves: widened to fp32 here, as pairs of bf16 in bf16_prefill_tile.h.
#pragma once

#include "core/limits.h"
#include "core/params.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr int64_t kTile = core::kPrefillTileTokens;

// A tile offers:
//   load_query    takes a query of the block
//   load          fills the tile with the positions [begin, end)
//   logits        to[g * kTile + t] for kHeads queries from `query` on and the first num_slots tokens
//   take_weights  turns query g's logits into weights, exp(logit - max) as the tile rounds them, for
//                 add_values; g counts from the last `logits`
//   add_values    acc[g] += sum over the slots [begin, end) of weight * v, for kHeads queries from g on

// The sum of a query's weights, and what it was before they were rounded.
struct WeightSums {
  float exact;
  float rounded;
};

// Calls stored(page id, first slot, number of tokens, place in the tile) for each run of tokens [begin, end)
// in one page, and fresh(row of the new tokens, place in the tile) for those that are not stored.
template <typename Stored, typename Fresh>
inline void for_each_run(const core::PrefillAttentionParams& params, const core::PrefillBlock& block,
                         int64_t begin, int64_t end, const Stored& stored, const Fresh& fresh) {
  int64_t position = begin;
  while (position < end && position < block.stored) {
    const int64_t slot = position % params.page_size;
    int64_t count = params.page_size - slot;
    if (count > end - position) count = end - position;
    if (count > block.stored - position) count = block.stored - position;
    stored(block.page_table[position / params.page_size], slot, count, position - begin);
    position += count;
  }
  for (; position < end; ++position) {
    fresh(block.first_new_row + position - block.stored, position - begin);
  }
}

template <typename T>
inline void widen_keys(const T* token, int64_t token_stride, int64_t channel_stride, int64_t count,
                       int64_t head_dim, float* tile) {
  if (channel_stride == 1) {
    float row[core::kMaxHeadDim];
    for (int64_t t = 0; t < count; ++t) {
      load_row(token + t * token_stride, head_dim, row);
      for (int64_t d = 0; d < head_dim; ++d) tile[d * kTile + t] = row[d];
    }
  } else {
    for (int64_t d = 0; d < head_dim; ++d) {
      const T* channel = token + d * channel_stride;
      for (int64_t t = 0; t < count; ++t) tile[d * kTile + t] = to_float(channel[t]);
    }
  }
}

// Turns the codes of `count` int8 tokens into keys and values; all of them are stored tokens.
inline void dequantise(const float* k_scales, const float* v_scales, int64_t count, int64_t head_dim,
                       float* k_tile, float* v_tile) {
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int64_t t = 0; t < count; ++t) k_tile[d * kTile + t] *= k_scales[t];
  }
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t d = 0; d < head_dim; ++d) v_tile[t * head_dim + d] *= v_scales[t];
  }
}

class FloatTile {
 public:
  void load_query(const core::PrefillAttentionParams& params, int64_t row, int64_t query_head,
                  int64_t query) {
    tinyserve::cpu::TINYSERVE_TARGET::load_query(params.q, row, query_head, params.head_dim, params.sm_scale,
                                                 q_ + query * params.head_dim);
  }

  void load(const core::PrefillAttentionParams& params, const core::PrefillBlock& block, int64_t head,
            int64_t begin, int64_t end) {
    const int64_t head_dim = params.head_dim;
    for_each_run(
        params, block, begin, end,
        [&](int64_t page_id, int64_t slot, int64_t count, int64_t t) {
          load_stored(params, page_id, head, slot, count, t);
        },
        [&](int64_t row, int64_t t) {
          float key[core::kMaxHeadDim];
          load_row(params.k.data, params.k.type, row * params.k.token_stride + head * params.k.head_stride,
                   head_dim, key);
          for (int64_t d = 0; d < head_dim; ++d) k_[d * kTile + t] = key[d];
          load_row(params.v.data, params.v.type, row * params.v.token_stride + head * params.v.head_stride,
                   head_dim, v_ + t * head_dim);
        });
    const int64_t filled = end - begin;
    for (int64_t d = 0; d < head_dim && filled < kTile; ++d) {
      __builtin_memset(k_ + d * kTile + filled, 0, static_cast<size_t>(kTile - filled) * sizeof(float));
    }
  }

  template <int kHeads>
  void logits(const core::PrefillAttentionParams& params, int64_t query, int64_t num_slots, float* to) {
    channel_major_logits<kHeads>(q_ + query * params.head_dim, k_, NothingAhead{}, kTile, num_slots,
                                 params.head_dim, to, kTile);
    weights_ = to;
  }

  WeightSums take_weights(int /* g */, float* logits, int64_t num_slots, float max) const {
    const float sum = softmax_numerators(logits, num_slots, max);
    return {sum, sum};
  }

  template <int kHeads>
  void add_values(int g, int64_t begin, int64_t end, int64_t head_dim, float* acc) const {
    accumulate_values<kHeads>(weights_ + g * kTile, kTile, v_, NothingAhead{}, head_dim, begin, end, head_dim,
                              acc);
  }

 private:
  void load_stored(const core::PrefillAttentionParams& params, int64_t page_id, int64_t head, int64_t slot,
                   int64_t count, int64_t t) {
    const int64_t head_dim = params.head_dim;
    const core::PagePoolView &k = params.k_pages, &v = params.v_pages;
    dispatch_page_element(k.type, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      widen_keys(k.page<T>(page_id, head) + slot * k.token_stride, k.token_stride, k.channel_stride, count,
                 head_dim, k_ + t);
      const T* value = v.page<T>(page_id, head) + slot * v.token_stride;
      for (int64_t i = 0; i < count; ++i) {
        load_row(value + i * v.token_stride, head_dim, v_ + (t + i) * head_dim);
      }
    });
    if (k.scales != nullptr) {
      dequantise(k.token_scales(page_id, head) + slot, v.token_scales(page_id, head) + slot, count, head_dim,
                 k_ + t, v_ + t * head_dim);
    }
  }

  alignas(64) float k_[core::kMaxHeadDim * kTile];                  // channel-major [head_dim, kTile]
  alignas(64) float v_[kTile * core::kMaxHeadDim];                  // [kTile, head_dim]
  alignas(64) float q_[core::kPrefillQueries * core::kMaxHeadDim];  // scaled by sm_scale
  const float* weights_;
};

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
