// Fits the low-rank summary of one page, by one warp (formula and reasons:
// tinyserve_ops/reference/low_rank.py): one rank after the other takes the leading direction of what the
// ranks before it, as quantised, have left. That lies in shared memory. A channel has one lane throughout, so
// lanes meet only over what belongs to a token, and to pack codes.
#pragma once

#include <cstdint>

#include "core/page_pool_view.h"
#include "core/scorer.h"
#include "cuda/arch.cuh"
#include "cuda/codes.cuh"
#include "cuda/element.cuh"
#include "cuda/page_keys.cuh"

namespace tinyserve::cuda {

inline constexpr int kNumPowerIterations = 2;
inline constexpr float kMaxMeanCode = 127.0F;
inline constexpr float kMaxInt4Code = 7.0F;
// The largest key is scaled to [1, 2) first; residuals shorter than this may be rounding noise of the mean.
inline constexpr float kNoise = 0x1p-16F;

// Tokens whose sums over the channels are taken together.
inline constexpr int kFitTokens = 8;

// A warp's part of shared memory.
struct LowRankFit {
  int page_size;
  int head_dim;
  float* residual;  // [num_rows()][head_dim], zeros behind the last token
  float* vector;    // [head_dim]
  float* along;     // [num_rows()]
  float* weight;    // [num_rows()]

  static constexpr int rows_of(int page_size) {
    return (page_size + kFitTokens - 1) / kFitTokens * kFitTokens;
  }
  static constexpr int64_t shared_bytes(int64_t page_size, int64_t head_dim) {
    const int64_t rows = rows_of(static_cast<int>(page_size));
    return static_cast<int64_t>(sizeof(float)) * ((rows + 1) * head_dim + 2 * rows);
  }

  __device__ __forceinline__ LowRankFit(int64_t tokens, int64_t channels, float* shared)
      : page_size(static_cast<int>(tokens)), head_dim(static_cast<int>(channels)), residual(shared) {
    vector = residual + num_rows() * head_dim;
    along = vector + head_dim;
    weight = along + num_rows();
  }
  __device__ __forceinline__ int num_rows() const { return rows_of(page_size); }
};

// f(d) for the channels of the lane.
template <typename F>
__device__ __forceinline__ void for_channels(const LowRankFit& fit, const F& f) {
  for (int d = static_cast<int>(threadIdx.x) % kWarpSize; d < fit.head_dim; d += kWarpSize) f(d);
}

// f(t) for every row, one lane each.
template <typename F>
__device__ __forceinline__ void for_tokens(const LowRankFit& fit, const F& f) {
  for (int t = static_cast<int>(threadIdx.x) % kWarpSize; t < fit.num_rows(); t += kWarpSize) f(t);
}

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(kFullWarp, x, mask);
  return x;
}

// Of numbers that are not negative and not NaN: their bits are ordered as they are.
__device__ __forceinline__ float max_over_warp(float x) {
  return __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(x)));
}

// store(t, sum) by one lane for every row: the sum over the channels of term(t, d). What `store` writes is
// seen by all lanes afterwards.
template <typename Term, typename Store>
__device__ __forceinline__ void sum_channels(const LowRankFit& fit, const Term& term, const Store& store) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  __syncwarp();  // nobody reads any more what `store` overwrites
#pragma unroll 1
  for (int first = 0; first < fit.num_rows(); first += kFitTokens) {
    float sums[kFitTokens] = {};
    for_channels(fit, [&](int d) {
#pragma unroll
      for (int j = 0; j < kFitTokens; ++j) sums[j] += term(first + j, d);
    });
    // Half of the tokens go to one half of the lanes, and so on until a lane has one.
#pragma unroll
    for (int half = kFitTokens / 2; half > 0; half /= 2) {
      const bool upper = (lane & half) != 0;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float given = upper ? sums[i] : sums[i + half];
        const float kept = upper ? sums[i + half] : sums[i];
        sums[i] = kept + __shfl_xor_sync(kFullWarp, given, half);
      }
    }
#pragma unroll
    for (int mask = kFitTokens; mask < kWarpSize; mask *= 2) {
      sums[0] += __shfl_xor_sync(kFullWarp, sums[0], mask);
    }
    if (lane < kFitTokens) store(first + lane, sums[0]);
  }
  __syncwarp();
}

// The smallest bf16 number that is not below x (finite, not negative).
__device__ __forceinline__ float round_up_to_bf16(float x) {
  return __uint_as_float((__float_as_uint(x) + 0xffffU) & 0xffff0000U);
}

// 2^exponent for a normal result.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ __forceinline__ float quantise_to(float x, float scale, float max_code) {
  return scale > 0.0F ? nearest_code(x / scale, max_code) : 0.0F;
}

// Writes blocks of int4 codes (layout: core/scorer.h). codes: integers in [-7, 7] in shared memory.
__device__ __forceinline__ void pack_int4(const float* codes, int n, uint8_t* blocks) {
  const auto num_bytes = static_cast<int>(core::int4_bytes(n));
  const auto stored = [&](int i) { return static_cast<unsigned>((i < n ? codes[i] : 0.0F) + 8.0F); };
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < num_bytes; i += kWarpSize) {
    const int first = i / 8 * 16 + i % 8;
    blocks[i] = static_cast<uint8_t>(stored(first) | stored(first + 8) << 4);
  }
}

// fit.residual: the keys made finite (NaN 0, infinities the largest number) and scaled by a power of two, so
// that the largest magnitude lies in [1, 2) and every product stays in range; returns the exponent.
template <typename T>
__device__ __forceinline__ int load_normalised(const PageKeys<T>& keys, const LowRankFit& fit) {
  float largest = 0.0F;
  for (int first = 0; first < fit.num_rows(); first += kFitTokens) {
    for_channels(fit, [&](int d) {
      float x[kFitTokens];
#pragma unroll
      for (int j = 0; j < kFitTokens; ++j) x[j] = first + j < fit.page_size ? keys.at(first + j, d) : 0.0F;
#pragma unroll
      for (int j = 0; j < kFitTokens; ++j) {
        x[j] = clamp_to_finite(x[j], kLargestFloat);
        largest = fmaxf(largest, fabsf(x[j]));
        fit.residual[(first + j) * fit.head_dim + d] = x[j];
      }
    });
  }
  largest = max_over_warp(largest);
  if (largest == 0.0F) return 0;
  // A subnormal largest key reads as -127 and is clamped; then keys stay below 1.
  const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -126), 126);
  const float scale = power_of_two(-exponent);
  for_channels(fit, [&](int d) {
    for (int t = 0; t < fit.page_size; ++t) fit.residual[t * fit.head_dim + d] *= scale;
  });
  return exponent;
}

// The first of the rows with the greatest fit.along.
struct LongestRow {
  int t;
  float length;
};
__device__ __forceinline__ LongestRow find_longest(const LowRankFit& fit) {
  LongestRow longest{fit.num_rows(), 0.0F};
  for_tokens(fit, [&](int t) {
    if (fit.along[t] > longest.length) longest = {t, fit.along[t]};
  });
  const float length = max_over_warp(longest.length);
  if (longest.length != length) longest.t = fit.num_rows();
  return {__reduce_min_sync(kFullWarp, longest.t), length};
}

// The quantised rank-1 fit of the residual: fit.vector and fit.along, in codes, and the scale, which is
// returned. Takes the fit off the residual.
__device__ __forceinline__ float fit_one_rank(const LowRankFit& fit) {
  const int head_dim = fit.head_dim;
  const auto with_vector = [&](int t, int d) { return fit.residual[t * head_dim + d] * fit.vector[d]; };
  sum_channels(
      fit, [&](int t, int d) { return fit.residual[t * head_dim + d] * fit.residual[t * head_dim + d]; },
      [&](int t, float sum) { fit.along[t] = fit.weight[t] * sqrtf(sum); });
  const LongestRow start = find_longest(fit);
  if (start.length >= kNoise) {
    for_channels(fit,
                 [&](int d) { fit.vector[d] = fit.weight[start.t] * fit.residual[start.t * head_dim + d]; });
#pragma unroll 1
    for (int i = 0; i < kNumPowerIterations; ++i) {
      float squares = 0.0F;
      for_channels(fit, [&](int d) { squares += fit.vector[d] * fit.vector[d]; });
      const float length = sqrtf(sum_over_warp(squares));
      const float inverse = length > 0.0F ? 1.0F / length : 0.0F;
      // Both products are with weighted rows.
      sum_channels(fit, with_vector,
                   [&](int t, float sum) { fit.along[t] = inverse * (fit.weight[t] * sum) * fit.weight[t]; });
      for_channels(fit, [&](int d) {
        float sum = 0.0F;
        for (int t = 0; t < fit.page_size; ++t) sum += fit.along[t] * fit.residual[t * head_dim + d];
        fit.vector[d] = sum;
      });
    }
  } else {
    for_channels(fit, [&](int d) { fit.vector[d] = 0.0F; });
  }

  float largest = 0.0F;
  for_channels(fit, [&](int d) { largest = fmaxf(largest, fabsf(fit.vector[d])); });
  const float step = max_over_warp(largest) / kMaxInt4Code;
  float squares = 0.0F;
  for_channels(fit, [&](int d) {
    fit.vector[d] = quantise_to(fit.vector[d], step, kMaxInt4Code);
    squares += fit.vector[d] * fit.vector[d];
  });
  const float length = sum_over_warp(squares);
  const float inverse = length > 0.0F ? 1.0F / length : 0.0F;
  sum_channels(fit, with_vector, [&](int t, float sum) { fit.along[t] = inverse * sum; });
  largest = 0.0F;
  for_tokens(fit, [&](int t) { largest = fmaxf(largest, fabsf(fit.along[t])); });
  const float scale = round_up_to_bf16(max_over_warp(largest) / kMaxInt4Code);
  for_tokens(fit, [&](int t) { fit.along[t] = quantise_to(fit.along[t], scale, kMaxInt4Code); });
  __syncwarp();
  for_channels(fit, [&](int d) {
    for (int t = 0; t < fit.page_size; ++t) {
      fit.residual[t * head_dim + d] -= scale * fit.along[t] * fit.vector[d];
    }
  });
  return scale;
}

// summary: a row of scorer.summary_bytes(); `shared`: LowRankFit::shared_bytes() for this warp alone.
template <typename T>
__device__ __forceinline__ void fit_low_rank(const PageKeys<T>& keys, const core::Scorer& scorer,
                                             uint8_t* summary, float* shared) {
  const core::LowRankLayout layout = scorer.low_rank_layout(keys.head_dim, keys.page_size);
  const LowRankFit fit(keys.page_size, keys.head_dim, shared);
  auto* scales = reinterpret_cast<__nv_bfloat16*>(summary + layout.scales);
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  const int exponent = load_normalised(keys, fit);
  const auto store_scale = [&](int i, float scale) {
    if (first_lane) from_float(scale * power_of_two(exponent), scales[i]);
  };

  float largest = 0.0F;
  for_channels(fit, [&](int d) {
    float sum = 0.0F;
    for (int t = 0; t < fit.page_size; ++t) sum += fit.residual[t * fit.head_dim + d];
    fit.vector[d] = sum / static_cast<float>(fit.page_size);
    largest = fmaxf(largest, fabsf(fit.vector[d]));
  });
  const float mean_scale = round_up_to_bf16(max_over_warp(largest) / kMaxMeanCode);
  store_scale(0, mean_scale);
  for_channels(fit, [&](int d) {
    const float code = quantise_to(fit.vector[d], mean_scale, kMaxMeanCode);
    summary[d] = static_cast<uint8_t>(static_cast<int8_t>(code));
    for (int t = 0; t < fit.page_size; ++t) fit.residual[t * fit.head_dim + d] -= fit.vector[d];
  });

  sum_channels(
      fit,
      [&](int t, int d) { return fit.residual[t * fit.head_dim + d] * fit.residual[t * fit.head_dim + d]; },
      [&](int t, float sum) { fit.weight[t] = sqrtf(sum); });
  largest = 0.0F;
  for_tokens(fit, [&](int t) { largest = fmaxf(largest, fit.weight[t]); });
  const float farthest = max_over_warp(largest);
  for_tokens(fit, [&](int t) {
    const float share = farthest >= kNoise ? fit.weight[t] / farthest : 0.0F;
    fit.weight[t] = share * sqrtf(share);
  });

#pragma unroll 1
  for (int r = 0; r < scorer.rank; ++r) {
    store_scale(1 + r, fit_one_rank(fit));
    __syncwarp();
    pack_int4(fit.vector, fit.head_dim, summary + layout.basis + r * layout.basis_bytes);
    pack_int4(fit.along, fit.page_size, summary + layout.coefficients + r * layout.coefficient_bytes);
    __syncwarp();  // the next rank overwrites the codes
  }
}

}  // namespace tinyserve::cuda
