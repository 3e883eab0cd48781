// A row of head_dim channels spread over a warp: lane l holds channels l, l + 32, ... Neighbouring lanes
// touch neighbouring channels, and because a channel has one lane throughout, what a lane has written to a
// page it can read back without a barrier.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/element.cuh"

namespace tinyserve::cuda {

inline constexpr int kLaneChannels = static_cast<int>(core::kMaxHeadDim) / kWarpSize;

struct WarpRow {
  float x[kLaneChannels];
};

// f(i, d): channel d is the lane's i-th. Unrolled, so that a WarpRow stays in registers.
template <typename F>
__device__ __forceinline__ void for_each_channel(int64_t head_dim, const F& f) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const int d = i * kWarpSize + lane;
    if (d < head_dim) f(i, d);
  }
}

template <typename T>
__device__ __forceinline__ WarpRow load_row(const T* row, int64_t head_dim) {
  WarpRow out = {};
  for_each_channel(head_dim, [&](int i, int d) { out.x[i] = to_float(row[d]); });
  return out;
}

__device__ __forceinline__ WarpRow load_row(const core::PackedView& packed, int64_t token, int64_t head,
                                            int64_t head_dim) {
  const int64_t offset = token * packed.token_stride + head * packed.head_stride;
  switch (packed.type) {
    case core::ElementType::kFloat16:
      return load_row(static_cast<const __half*>(packed.data) + offset, head_dim);
    case core::ElementType::kBFloat16:
      return load_row(static_cast<const __nv_bfloat16*>(packed.data) + offset, head_dim);
    default:
      return load_row(static_cast<const float*>(packed.data) + offset, head_dim);
  }
}

// The largest magnitude of a row, as bits: without the sign, floats are ordered as integers are, infinity
// comes behind all numbers and NaN last. All lanes get it.
__device__ __forceinline__ unsigned largest_magnitude(const WarpRow& row) {
  unsigned largest = 0;  // channels beyond head_dim are 0
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const unsigned magnitude = __float_as_uint(row.x[i]) & 0x7fffffffU;
    if (magnitude > largest) largest = magnitude;
  }
  return __reduce_max_sync(kFullWarp, largest);
}

// Replaces a row by its int8 codes and returns their scale: symmetric, value = scale * code, scale = largest
// magnitude / 127, rounded to nearest, ties to even. A row with a NaN or an infinity has scale NaN and codes
// 0.
__device__ __forceinline__ float quantise(WarpRow& row) {
  const unsigned largest = largest_magnitude(row);
  constexpr unsigned kInfinityBits = 0x7f800000U;
  const float scale =
      largest < kInfinityBits ? __uint_as_float(largest) / 127.0F : __uint_as_float(0x7fc00000U);
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    // A scale of a few units in the last place of zero may give ratios somewhat above 127.
    const float ratio = scale > 0.0F ? row.x[i] / scale : 0.0F;
    row.x[i] = rintf(ratio > 127.0F ? 127.0F : (ratio < -127.0F ? -127.0F : ratio));
  }
  return scale;
}

// Writes a row to a slot of a page, with its scale where pages are int8.
template <typename T>
__device__ __forceinline__ void store_row(WarpRow row, const core::PagePoolView& pool, int64_t page_id,
                                          int64_t head, int64_t slot, int64_t head_dim) {
  T* to = pool.page<T>(page_id, head) + slot * pool.token_stride;
  if constexpr (std::is_same_v<T, int8_t>) {
    const float scale = quantise(row);
    if (threadIdx.x % kWarpSize == 0) pool.token_scales(page_id, head)[slot] = scale;
    for_each_channel(head_dim,
                     [&](int i, int d) { to[d * pool.channel_stride] = static_cast<int8_t>(row.x[i]); });
  } else {
    for_each_channel(head_dim, [&](int i, int d) { from_float(row.x[i], to[d * pool.channel_stride]); });
  }
}

}  // namespace tinyserve::cuda
