// The keys of one page and kv head as attention reads them, widened to fp32, whatever the layout and element
// type of the pool; and what a summary makes of keys that are no numbers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/page_pool_view.h"
#include "cuda/arch.cuh"
#include "cuda/element.cuh"
#include "cuda/warp_row.cuh"

namespace tinyserve::cuda {

template <typename T>
struct PageKeys {
  const T* keys;
  const float* scales;  // int8 only
  int64_t token_stride;
  int64_t channel_stride;
  int64_t page_size;
  int64_t head_dim;

  __device__ __forceinline__ PageKeys(const core::PagePoolView& pool, int64_t page_id, int64_t head,
                                      int64_t tokens, int64_t channels)
      : keys(pool.page<T>(page_id, head)),
        scales(std::is_same_v<T, int8_t> ? pool.token_scales(page_id, head) : nullptr),
        token_stride(pool.token_stride),
        channel_stride(pool.channel_stride),
        page_size(tokens),
        head_dim(channels) {}

  __device__ __forceinline__ float at(int64_t t, int64_t d) const {
    const T key = keys[t * token_stride + d * channel_stride];
    if constexpr (std::is_same_v<T, int8_t>) {
      return scales[t] * static_cast<float>(key);
    } else {
      return to_float(key);
    }
  }
  __device__ __forceinline__ WarpRow row(int64_t t) const {
    WarpRow out = {};
    for_each_channel(head_dim, [&](int i, int d) { out.x[i] = at(t, d); });
    return out;
  }
};

inline constexpr float kLargestFloat = 3.402823466e+38F;

// No infinity may meet a zero in the score. NaN becomes 0.
__device__ __forceinline__ float clamp_to_finite(float x, float largest) {
  if (x != x) return 0.0F;
  return x > largest ? largest : (x < -largest ? -largest : x);
}

}  // namespace tinyserve::cuda
