// Joins partial attention results by their log-sum-exp, in index order; one block per row and head, one
// thread per channel. Compiled for sm_80 and sm_90, not yet run on a GPU.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/limits.h"
#include "cuda/merge_states.h"

namespace tinyserve::cuda {
namespace {

constexpr unsigned kMaxBlocks = 1U << 20;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void from_float(float x, float& out) { out = x; }
__device__ void from_float(float x, __half& out) { out = __float2half_rn(x); }
__device__ void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

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

template <typename T>
cudaError_t launch(const core::MergeStatesParams& params, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(params.num_rows_heads < kMaxBlocks ? params.num_rows_heads : kMaxBlocks);
  merge_states_kernel<T><<<blocks, static_cast<unsigned>(params.head_dim), 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t merge_states(const core::MergeStatesParams& params, cudaStream_t stream) {
  if (params.num_rows_heads == 0) return cudaSuccess;
  switch (params.type) {
    case core::ElementType::kFloat32:
      return launch<float>(params, stream);
    case core::ElementType::kFloat16:
      return launch<__half>(params, stream);
    case core::ElementType::kBFloat16:
      return launch<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace tinyserve::cuda
