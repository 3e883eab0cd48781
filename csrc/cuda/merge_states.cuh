// Joins partial attention results by their log-sum-exp, in index order; one block per row and head, one
// thread per channel.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/element.cuh"

namespace tinyserve::cuda {

template <typename T>
__global__ void merge_states_kernel(core::MergeStatesParams params) {
  const int64_t d = threadIdx.x;
  for (int64_t item = blockIdx.x; item < params.num_rows_heads; item += gridDim.x) {
    float max = -INFINITY;
    for (int64_t s = 0; s < params.num_states; ++s) {
      const float lse = params.lses[s * params.num_rows_heads + item];
      if (lse > max) max = lse;  // a NaN still makes its weight NaN
    }
    float merged = 0.0F;
    float sum = 0.0F;
    for (int64_t s = 0; s < params.num_states; ++s) {
      const int64_t index = s * params.num_rows_heads + item;
      if (params.lses[index] == -INFINITY) continue;  // nothing attended: its output does not count
      const float weight = expf(params.lses[index] - max);
      merged += weight * to_float(static_cast<const T*>(params.outs)[index * params.head_dim + d]);
      sum += weight;
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
    from_float(merged * inverse, static_cast<T*>(params.out)[item * params.head_dim + d]);
    if (d == 0) params.lse[item] = sum == 0.0F ? -INFINITY : max + logf(sum);
  }
}

}  // namespace tinyserve::cuda
