// The inner loops of attention over a tile of keys and values, shared by decode and prefill: logits, softmax
// numerators, weighted values. A tile is read once for up to kHeadBlock queries.
#pragma once

#include <type_traits>

#include "core/limits.h"
#include "core/params.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int64_t kHeadBlock = 4;  // queries per pass over a tile: what 16 vector registers hold

constexpr int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// One query row and head, widened to fp32 and scaled.
inline void load_query(const core::PackedView& queries, int64_t row, int64_t head, int64_t head_dim,
                       float sm_scale, float* q) {
  load_row(queries.data, queries.type, row * queries.token_stride + head * queries.head_stride, head_dim, q);
  for (int64_t d = 0; d < head_dim; d += kLanes) store(q + d, load(q + d) * splat(sm_scale));
}

// logits[g * stride + t] = dot(q_g, k_t) for kVectors * kLanes tokens from `keys` on. Few heads give few
// independent sums, too few to hide the latency of a multiply-add: then two channels are summed apart.
template <int kHeads, int kVectors, typename T>
inline void token_block_logits(const float* q, const T* keys, int64_t channel_stride, int64_t num_tokens,
                               int64_t head_dim, float* logits, int64_t stride) {
  constexpr int kDepth = kHeads * kVectors <= 6 ? 2 : 1;
  F32x8 sum[kDepth][kHeads][kVectors];
  for (int c = 0; c < kDepth; ++c) {
    for (int g = 0; g < kHeads; ++g) {
      for (int i = 0; i < kVectors; ++i) sum[c][g][i] = splat(0.0F);
    }
  }
  const bool partial = num_tokens < kVectors * kLanes;
  for (int64_t d = 0; d < head_dim; d += kDepth) {
    for (int c = 0; c < kDepth; ++c, keys += channel_stride) {
      F32x8 k[kVectors];
      for (int i = 0; i < kVectors; ++i)
        k[i] = partial ? load_first(keys, num_tokens) : load(keys + i * kLanes);
      for (int g = 0; g < kHeads; ++g) {
        const F32x8 q_gd = splat(q[g * head_dim + d + c]);
        for (int i = 0; i < kVectors; ++i) sum[c][g][i] += q_gd * k[i];
      }
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < kVectors; ++i) {
      F32x8 total = sum[0][g][i];
      if constexpr (kDepth == 2) total += sum[1][g][i];
      store(logits + g * stride + i * kLanes, total);
    }
  }
}

// logits[g * stride + t] = dot(q_g, k_t) for every token of a channel-major tile.
template <int kHeads, typename T>
inline void channel_major_logits(const float* q, const T* keys, int64_t channel_stride, int64_t num_tokens,
                                 int64_t head_dim, float* logits, int64_t stride) {
  int64_t t = 0;
  for (; t + 2 * kLanes <= num_tokens; t += 2 * kLanes) {
    token_block_logits<kHeads, 2>(q, keys + t, channel_stride, 2 * kLanes, head_dim, logits + t, stride);
  }
  for (; t < num_tokens; t += kLanes) {
    token_block_logits<kHeads, 1>(q, keys + t, channel_stride, num_tokens - t, head_dim, logits + t, stride);
  }
}

// acc[g] += sum over the visible slots of probabilities[g] * v, for kVectors * kLanes channels.
template <int kHeads, int kVectors, typename T>
inline void accumulate_channels(const float* probabilities, int64_t stride, const T* values,
                                int64_t token_stride, int64_t first_slot, int64_t end_slot, int64_t head_dim,
                                float* acc) {
  F32x8 sum[kHeads][kVectors];
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < kVectors; ++i) sum[g][i] = load(acc + g * head_dim + i * kLanes);
  }
  for (int64_t t = first_slot; t < end_slot; ++t) {
    F32x8 v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = load(values + t * token_stride + i * kLanes);
    for (int g = 0; g < kHeads; ++g) {
      const F32x8 p = splat(probabilities[g * stride + t]);
      for (int i = 0; i < kVectors; ++i) sum[g][i] += p * v[i];
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < kVectors; ++i) store(acc + g * head_dim + i * kLanes, sum[g][i]);
  }
}

// acc[g] += sum over the visible slots of probabilities[g] * v
template <int kHeads, typename T>
inline void accumulate_values(const float* probabilities, int64_t stride, const T* values,
                              int64_t token_stride, int64_t first_slot, int64_t end_slot, int64_t head_dim,
                              float* acc) {
  constexpr int kVectors = kHeads == 1 ? 8 : (kHeads <= 3 ? 4 : 2);
  int64_t d = 0;
  for (; d + kVectors * kLanes <= head_dim; d += kVectors * kLanes) {
    accumulate_channels<kHeads, kVectors>(probabilities, stride, values + d, token_stride, first_slot,
                                          end_slot, head_dim, acc + d);
  }
  for (; d < head_dim; d += kLanes) {
    accumulate_channels<kHeads, 1>(probabilities, stride, values + d, token_stride, first_slot, end_slot,
                                   head_dim, acc + d);
  }
}

// Turns one head's logits into exp(logit - max) and returns the sum; NaN logits give a NaN sum.
inline float softmax_numerators(float* logits, int64_t n, float max) {
  // A row whose logits are all -inf keeps them at 0 instead of NaN.
  const F32x8 shift = splat(max == kMinusInfinity ? 0.0F : max);
  F32x8 sum = splat(0.0F);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x8 numerator = exp_nonpositive(load(logits + i) - shift);
    store(logits + i, numerator);
    sum += numerator;
  }
  return horizontal_sum(sum);
}

inline float maximum(const float* logits, int64_t n) {
  F32x8 max = splat(kMinusInfinity);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x8 x = load(logits + i);
    max = x > max ? x : max;
  }
  float result = max[0];
  for (int i = 1; i < kLanes; ++i) {
    if (max[i] > result) result = max[i];
  }
  return result;
}

// Calls f with the number of heads as a compile-time constant, for kHeadBlock heads at a time.
template <typename F>
inline void for_each_head_block(int64_t group_size, const F& f) {
  for (int64_t g = 0; g < group_size; g += kHeadBlock) {
    switch (group_size - g < kHeadBlock ? group_size - g : kHeadBlock) {
      case 1:
        f(g, std::integral_constant<int, 1>{});
        break;
      case 2:
        f(g, std::integral_constant<int, 2>{});
        break;
      case 3:
        f(g, std::integral_constant<int, 3>{});
        break;
      default:
        f(g, std::integral_constant<int, 4>{});
        break;
    }
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
