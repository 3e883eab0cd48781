// The inner loops of attention over a tile of keys and values, shared by decode and prefill: logits, softmax
// numerators, weighted values. A tile is read once for up to kHeadBlock queries.
#pragma once

#include <type_traits>

#include "core/limits.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int64_t kHeadBlock = 4;  // queries per pass over a tile: what 16 vector registers hold

constexpr int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// logits[g * stride + t] = dot(q_g, k_t) for every token of a channel-major tile.
template <int kHeads, typename T>
inline void channel_major_logits(const float* q, const T* keys, int64_t channel_stride, int64_t page_size,
                                 int64_t head_dim, float* logits, int64_t stride) {
  int64_t t = 0;
  for (; t + 2 * kLanes <= page_size; t += 2 * kLanes) {
    F32x8 low[kHeads];
    F32x8 high[kHeads];
    for (int g = 0; g < kHeads; ++g) low[g] = high[g] = splat(0.0F);
    const T* channel = keys + t;
    for (int64_t d = 0; d < head_dim; ++d, channel += channel_stride) {
      const F32x8 k_low = load(channel);
      const F32x8 k_high = load(channel + kLanes);
      for (int g = 0; g < kHeads; ++g) {
        const F32x8 q_gd = splat(q[g * head_dim + d]);
        low[g] += q_gd * k_low;
        high[g] += q_gd * k_high;
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      store(logits + g * stride + t, low[g]);
      store(logits + g * stride + t + kLanes, high[g]);
    }
  }
  for (; t < page_size; t += kLanes) {
    F32x8 sum[kHeads];
    for (int g = 0; g < kHeads; ++g) sum[g] = splat(0.0F);
    const int64_t n = page_size - t;
    const T* channel = keys + t;
    for (int64_t d = 0; d < head_dim; ++d, channel += channel_stride) {
      const F32x8 k = n >= kLanes ? load(channel) : load_first(channel, n);
      for (int g = 0; g < kHeads; ++g) sum[g] += splat(q[g * head_dim + d]) * k;
    }
    for (int g = 0; g < kHeads; ++g) store(logits + g * stride + t, sum[g]);
  }
}

// acc[g] += sum over the visible slots of probabilities[g] * v
template <int kHeads, typename T>
inline void accumulate_values(const float* probabilities, int64_t stride, const T* values,
                              int64_t token_stride, int64_t first_slot, int64_t end_slot, int64_t head_dim,
                              float* acc) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    F32x8 low[kHeads];
    F32x8 high[kHeads];
    for (int g = 0; g < kHeads; ++g) {
      low[g] = load(acc + g * head_dim + d);
      high[g] = load(acc + g * head_dim + d + kLanes);
    }
    for (int64_t t = first_slot; t < end_slot; ++t) {
      const F32x8 v_low = load(values + t * token_stride + d);
      const F32x8 v_high = load(values + t * token_stride + d + kLanes);
      for (int g = 0; g < kHeads; ++g) {
        const F32x8 p = splat(probabilities[g * stride + t]);
        low[g] += p * v_low;
        high[g] += p * v_high;
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      store(acc + g * head_dim + d, low[g]);
      store(acc + g * head_dim + d + kLanes, high[g]);
    }
  }
  if (d < head_dim) {
    for (int g = 0; g < kHeads; ++g) {
      F32x8 sum = load(acc + g * head_dim + d);
      for (int64_t t = first_slot; t < end_slot; ++t) {
        sum += splat(probabilities[g * stride + t]) * load(values + t * token_stride + d);
      }
      store(acc + g * head_dim + d, sum);
    }
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
    max = select(x > max, x, max);
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
