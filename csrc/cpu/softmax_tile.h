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

// Memory that will be read soon and a little later, asked for element by element in step with what is read
// now: a burst of prefetches would hold up the loads, and the hardware does not look past a 4 KiB page. Into
// the second-level cache, because the first level has few buffers for what is under way (24 on Zen 4); and
// twice, because a prefetch that finds no buffer is dropped. A wrong address does no harm.
template <typename T>
struct Ahead {
  const T* soon;
  const T* later;

  Ahead operator+(int64_t n) const { return {soon + n, later + n}; }
  void operator+=(int64_t n) { *this = *this + n; }
};

// Where nothing is read ahead.
struct NothingAhead {
  NothingAhead operator+(int64_t) const { return {}; }
  void operator+=(int64_t) {}
};

template <typename T>
inline void prefetch(Ahead<T> ahead) {
  __builtin_prefetch(ahead.soon, 0, 2);
  __builtin_prefetch(ahead.later, 0, 2);
}
inline void prefetch(NothingAhead) {}

// logits[g * stride + t] = dot(q_g, k_t) for sixteen tokens. Few heads give few independent sums, too few to
// hide the latency of a multiply-add: then several channels are summed apart (head_dim is a multiple of 8).
template <int kHeads, typename T, typename Next>
[[gnu::always_inline]] inline void sixteen_token_logits(const float* q, const T* keys, Next next,
                                                        int64_t channel_stride, int64_t head_dim,
                                                        float* logits, int64_t stride) {
  constexpr int kDepth = (kHeads == 1 ? 4 : (kHeads <= 3 ? 2 : 1)) * (kWideRegisters ? 2 : 1);
  F32x16 sum[kDepth][kHeads];
  for (int c = 0; c < kDepth; ++c) {
    for (int g = 0; g < kHeads; ++g) sum[c][g] = splat16(0.0F);
  }
#pragma GCC unroll 2
  for (int64_t d = 0; d < head_dim; d += kDepth) {
    for (int c = 0; c < kDepth; ++c) {
      prefetch(next);
      const F32x16 k = load16(keys);
      for (int g = 0; g < kHeads; ++g) sum[c][g] += splat16(q[g * head_dim + d + c]) * k;
      keys += channel_stride;
      next += channel_stride;
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int c = 1; c < kDepth; ++c) sum[0][g] += sum[c][g];
    store(logits + g * stride, restore_order<T>(sum[0][g]));
  }
}

// The same for the last tokens of a tile, fewer than sixteen: eight lanes, of which num_tokens exist.
template <int kHeads, typename T>
inline void last_token_logits(const float* q, const T* keys, int64_t channel_stride, int64_t num_tokens,
                              int64_t head_dim, float* logits, int64_t stride) {
  F32x8 sum[kHeads];
  for (int g = 0; g < kHeads; ++g) sum[g] = splat(0.0F);
  for (int64_t d = 0; d < head_dim; ++d, keys += channel_stride) {
    const F32x8 k = num_tokens < kLanes ? load_first(keys, num_tokens) : load(keys);
    for (int g = 0; g < kHeads; ++g) sum[g] += splat(q[g * head_dim + d]) * k;
  }
  for (int g = 0; g < kHeads; ++g) store(logits + g * stride, sum[g]);
}

// logits[g * stride + t] = dot(q_g, k_t) for every token of a channel-major tile; `next` are tiles of the
// same shape to come.
template <int kHeads, typename T, typename Next>
inline void channel_major_logits(const float* q, const T* keys, Next next, int64_t channel_stride,
                                 int64_t num_tokens, int64_t head_dim, float* logits, int64_t stride) {
  int64_t t = 0;
  for (; t + 2 * kLanes <= num_tokens; t += 2 * kLanes) {
    sixteen_token_logits<kHeads>(q, keys + t, next + t, channel_stride, head_dim, logits + t, stride);
  }
  for (; t < num_tokens; t += kLanes) {
    last_token_logits<kHeads>(q, keys + t, channel_stride, num_tokens - t, head_dim, logits + t, stride);
  }
}

// acc[g] += sum over the slots [first_slot, end_slot) of probabilities[g] * v, for kBlocks * 16 channels.
// `acc` is in the lane order of T. Three heads alone leave too few independent sums: then two tokens are
// summed apart.
template <int kHeads, int kBlocks, typename T, typename Next>
[[gnu::always_inline]] inline void accumulate_channels(const float* probabilities, int64_t stride,
                                                       const T* values, Next next, int64_t token_stride,
                                                       int64_t first_slot, int64_t end_slot, int64_t head_dim,
                                                       float* acc) {
  constexpr int kDepth = kHeads * kBlocks == 3 ? 2 : 1;
  F32x16 sum[kDepth][kHeads][kBlocks];
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < kBlocks; ++i) {
      sum[0][g][i] = load16(acc + g * head_dim + i * 16);
      for (int c = 1; c < kDepth; ++c) sum[c][g][i] = splat16(0.0F);
    }
  }
  const auto add_token = [&](int64_t t, int c) {
    F32x16 v[kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
      prefetch(next + t * token_stride + i * 16);
      v[i] = load16(values + t * token_stride + i * 16);
    }
    for (int g = 0; g < kHeads; ++g) {
      const F32x16 p = splat16(probabilities[g * stride + t]);
      for (int i = 0; i < kBlocks; ++i) sum[c][g][i] += p * v[i];
    }
  };
  int64_t t = first_slot;
#pragma GCC unroll 2
  for (; t + kDepth <= end_slot; t += kDepth) {
    for (int c = 0; c < kDepth; ++c) add_token(t + c, c);
  }
  if (t < end_slot) add_token(t, 0);
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < kBlocks; ++i) {
      if constexpr (kDepth == 2) sum[0][g][i] += sum[1][g][i];
      store(acc + g * head_dim + i * 16, sum[0][g][i]);
    }
  }
}

// acc[g] += sum over the slots [first_slot, end_slot) of probabilities[g] * v. `acc` is in the lane order of
// T until restore_channels(); `next` are tiles of the same shape to come.
template <int kHeads, typename T, typename Next>
inline void accumulate_values(const float* probabilities, int64_t stride, const T* values, Next next,
                              int64_t token_stride, int64_t first_slot, int64_t end_slot, int64_t head_dim,
                              float* acc) {
  constexpr int kBlocks = (kHeads == 1 ? 2 : 1) * (kHeads <= 2 ? 2 : 1) * (kWideRegisters ? 4 : 1);
  int64_t d = 0;
  for (; d + kBlocks * 16 <= head_dim; d += kBlocks * 16) {
    accumulate_channels<kHeads, kBlocks>(probabilities, stride, values + d, next + d, token_stride,
                                         first_slot, end_slot, head_dim, acc + d);
  }
  for (; d + 16 <= head_dim; d += 16) {
    accumulate_channels<kHeads, 1>(probabilities, stride, values + d, next + d, token_stride, first_slot,
                                   end_slot, head_dim, acc + d);
  }
  if (d == head_dim) return;
  for (int g = 0; g < kHeads; ++g) {
    F32x8 sum = load(acc + g * head_dim + d);
    for (int64_t t = first_slot; t < end_slot; ++t) {
      sum += splat(probabilities[g * stride + t]) * load(values + t * token_stride + d);
    }
    store(acc + g * head_dim + d, sum);
  }
}

// Ends the lane order in which accumulate_values<T> left one head's sums.
template <typename T>
inline void restore_channels(float* acc, int64_t head_dim) {
  if constexpr (!kEvenOddLanes<T>) return;
  for (int64_t d = 0; d + 16 <= head_dim; d += 16) {
    store(acc + d, restore_order<T>(load16(acc + d)));
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
  return horizontal_maximum(max);
}

// Calls f with n, from 1 to kHeadBlock, as a compile-time constant.
template <typename F>
inline void with_num_heads(int64_t n, const F& f) {
  switch (n) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 3:
      return f(std::integral_constant<int, 3>{});
    default:
      return f(std::integral_constant<int, 4>{});
  }
}

// Calls f with the first of kHeadBlock heads at a time, and how many they are as a compile-time constant.
template <typename F>
inline void for_each_head_block(int64_t group_size, const F& f) {
  for (int64_t g = 0; g < group_size; g += kHeadBlock) {
    with_num_heads(group_size - g < kHeadBlock ? group_size - g : kHeadBlock,
                   [&](auto heads) { f(g, heads); });
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
