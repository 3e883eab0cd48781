// The summary of one full page and kv head, by one warp (layout: core/scorer.h; what it promises:
// cpu/summarise.h), here of the scorers that are linear in a feature of the query; low_rank_fit.cuh has the
// other kind. Every lane reads only its own channels (warp_row.cuh), so a page may be summarised by the warp
// that has just written to it, once the lanes have met after the scales of int8 rows.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/page_pool_view.h"
#include "core/scorer.h"
#include "cuda/arch.cuh"
#include "cuda/codes.cuh"
#include "cuda/low_rank_fit.cuh"
#include "cuda/page_keys.cuh"
#include "cuda/warp_row.cuh"

namespace tinyserve::cuda {

// Tokens outermost: the loads of a row are independent of each other.
template <typename T>
__device__ __forceinline__ WarpRow page_extreme(const PageKeys<T>& keys, float sign) {
  WarpRow extreme;
#pragma unroll
  for (float& x : extreme.x) x = NAN;  // NaN keys are left out; NaN stays where there is nothing else
  for (int64_t t = 0; t < keys.page_size; ++t) {
    const WarpRow row = keys.row(t);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const float x = sign * row.x[i];
      if (x > extreme.x[i] || extreme.x[i] != extreme.x[i]) extreme.x[i] = x;
    }
  }
#pragma unroll
  for (float& x : extreme.x) x *= sign;
  return extreme;
}

// The mean over the tokens of f(key, centre).
template <typename T, typename F>
__device__ __forceinline__ WarpRow page_mean(const PageKeys<T>& keys, const WarpRow& centre, const F& f) {
  WarpRow sum = {};
  for (int64_t t = 0; t < keys.page_size; ++t) {
    const WarpRow row = keys.row(t);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) sum.x[i] += f(row.x[i] - centre.x[i]);
  }
#pragma unroll
  for (float& x : sum.x) x /= static_cast<float>(keys.page_size);
  return sum;
}

template <typename T>
__device__ __forceinline__ WarpRow page_statistic(const PageKeys<T>& keys, core::PageStatistic statistic) {
  if (statistic == core::PageStatistic::kMax) return page_extreme(keys, 1.0F);
  if (statistic == core::PageStatistic::kMin) return page_extreme(keys, -1.0F);
  WarpRow mean = page_mean(keys, {}, [](float x) { return x; });
  if (statistic == core::PageStatistic::kMean) return mean;
  WarpRow deviation = page_mean(keys, mean, [](float x) { return x * x; });
#pragma unroll
  for (float& x : deviation.x) x = sqrtf(x);
  return deviation;
}

__device__ __forceinline__ float largest_finite(const core::Scorer& scorer) {
  if (scorer.encoding == core::SummaryEncoding::kFull) {
    if (scorer.full_type == core::ElementType::kFloat16) return 65504.0F;
    if (scorer.full_type == core::ElementType::kBFloat16) return 3.38953139e+38F;
  }
  return kLargestFloat;
}

// Smallest scale whose 127th multiple reaches `amax`.
__device__ __forceinline__ float code_scale(float amax) {
  float scale = amax / 127.0F;
  while (scale * 127.0F < amax) scale = __uint_as_float(__float_as_uint(scale) + 1);
  return scale;
}

// The code such that scale * code bounds x from above (kMax), from below (kMin), or is the nearest. The
// quotient's rounding may leave the nearest code two short of a bound, never more.
__device__ __forceinline__ float encode(float x, float scale, core::PageStatistic statistic) {
  if (scale == 0.0F) return 0.0F;
  float code = nearest_code(x / scale, 127.0F);
  for (int step = 0; step < 2; ++step) {
    const float restored = scale * code;
    if (statistic == core::PageStatistic::kMax && restored < x && code < 127.0F) code += 1.0F;
    if (statistic == core::PageStatistic::kMin && restored > x && code > -127.0F) code -= 1.0F;
  }
  return code;
}

template <typename Full>
__device__ __forceinline__ void store_full(const WarpRow& row, int64_t head_dim, uint8_t* vector) {
  for_each_channel(head_dim, [&](int i, int d) { from_float(row.x[i], reinterpret_cast<Full*>(vector)[d]); });
}

// The vectors of a linear scorer.
template <typename T>
__device__ __forceinline__ void summarise_vectors(const PageKeys<T>& keys, const core::Scorer& scorer,
                                                  uint8_t* summary) {
  const auto lane = static_cast<int64_t>(threadIdx.x % kWarpSize);
  const int64_t head_dim = keys.head_dim;
  const int64_t header_bytes = scorer.header_bytes();
  for (int64_t i = 4 * scorer.num_vectors + lane; i < header_bytes; i += kWarpSize) summary[i] = 0;
  const float largest = largest_finite(scorer);
  for (int v = 0; v < scorer.num_vectors; ++v) {
    const core::PageStatistic statistic = scorer.vectors[v].statistic;
    WarpRow row = page_statistic(keys, statistic);
#pragma unroll
    for (float& x : row.x) x = clamp_to_finite(x, largest);
    uint8_t* vector = summary + header_bytes + v * head_dim * scorer.code_bytes();
    if (scorer.encoding == core::SummaryEncoding::kInt8) {
      const float scale = code_scale(__uint_as_float(largest_magnitude(row)));
      if (lane == 0) reinterpret_cast<float*>(summary)[v] = scale;
      for_each_channel(head_dim, [&](int i, int d) {
        vector[d] = static_cast<uint8_t>(static_cast<int8_t>(encode(row.x[i], scale, statistic)));
      });
    } else if (scorer.full_type == core::ElementType::kFloat16) {
      store_full<__half>(row, head_dim, vector);
    } else if (scorer.full_type == core::ElementType::kBFloat16) {
      store_full<__nv_bfloat16>(row, head_dim, vector);
    } else {
      store_full<float>(row, head_dim, vector);
    }
  }
}

// T: element type of the pages. summary: a row of scorer.summary_bytes(), aligned to 16 bytes. `shared`: of
// this warp alone, seal_shared_bytes() of it.
template <typename T, bool kLowRank>
__device__ __forceinline__ void seal_page(const core::PagePoolView& pool, int64_t page_id, int64_t head,
                                          int64_t page_size, int64_t head_dim, const core::Scorer& scorer,
                                          uint8_t* summary, unsigned char* shared) {
  const auto lane = static_cast<int64_t>(threadIdx.x % kWarpSize);
  const int64_t end = scorer.summary_bytes(head_dim, page_size);
  for (int64_t i = scorer.used_bytes(head_dim, page_size) + lane; i < end; i += kWarpSize) summary[i] = 0;
  const PageKeys<T> keys(pool, page_id, head, page_size, head_dim);
  if constexpr (kLowRank) {
    fit_low_rank(keys, scorer, summary, reinterpret_cast<float*>(shared));
  } else {
    summarise_vectors(keys, scorer, summary);
  }
}

// Warps of a block that seals, at most `most`, and the shared memory of each.
struct SealLaunch {
  int num_warps;
  int64_t warp_bytes;
};
inline SealLaunch seal_launch(const core::Scorer& scorer, int64_t page_size, int64_t head_dim, int most) {
  if (scorer.linear()) return {most, 0};
  constexpr int64_t kBlockBytes = 48 << 10;  // what a launch gets without asking, unless one page takes more
  SealLaunch launch{most, LowRankFit::shared_bytes(page_size, head_dim)};
  while (launch.num_warps > 1 && launch.num_warps * launch.warp_bytes > kBlockBytes) launch.num_warps /= 2;
  return launch;
}

}  // namespace tinyserve::cuda
