// Joins the scores of a group's query heads to one per page in the log domain, for GroupReduction::kSoftmax:
// log sum_g exp(score_gj - lse_g), lse_g the log-sum-exp of head g's scores over all pages of the row that
// have a summary. One block per row and kv head, which adds in an order that depends on the row alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/params.h"
#include "core/row.h"
#include "cuda/arch.cuh"
#include "cuda/row.cuh"

namespace tinyserve::cuda {

inline constexpr int kJoinThreads = 512;
inline constexpr int kJoinWarps = kJoinThreads / kWarpSize;

// Joins one number of each thread of the block; all get the result. `shared` [kJoinWarps] is free again
// afterwards.
template <typename Join>
__device__ __forceinline__ float join_block(float x, float* shared, const Join& join) {
  const unsigned lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) x = join(x, __shfl_xor_sync(kFullWarp, x, mask));
  if (lane == 0) shared[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  x = shared[lane % kJoinWarps];
#pragma unroll
  for (int mask = kJoinWarps / 2; mask > 0; mask /= 2) x = join(x, __shfl_xor_sync(kFullWarp, x, mask));
  __syncthreads();
  return x;
}

// Log-sum-exp of n scores; NaN scores are left out, +inf gives +inf.
__device__ __forceinline__ float log_sum_exp_of_numbers(const float* scores, int64_t n, float* shared) {
  float max = -INFINITY;
  for (int64_t i = threadIdx.x; i < n; i += kJoinThreads) max = fmaxf(max, scores[i]);  // NaN loses
  max = join_block(max, shared, [](float a, float b) { return fmaxf(a, b); });
  if (max == -INFINITY || max == INFINITY) return max;
  float sum = 0.0F;
  for (int64_t i = threadIdx.x; i < n; i += kJoinThreads) {
    const float x = scores[i];
    if (x == x) sum += expf(x - max);
  }
  return max + logf(join_block(sum, shared, [](float a, float b) { return a + b; }));
}

// A head's score less its lse. A page at +inf has all of the head's share; a head that gives every page -inf
// (lse -inf) has none to give.
__device__ __forceinline__ float log_share(float score, float lse) {
  if (score == INFINITY) return 0.0F;
  return score == -INFINITY ? -INFINITY : score - lse;
}

// Grid: rows x kv heads. Shared memory: kJoinWarps + group_size floats.
__global__ void __launch_bounds__(kJoinThreads)
    join_scores_kernel(const __grid_constant__ core::ScorePagesBatchParams params) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  float* shared = reinterpret_cast<float*>(memory);
  float* lses = shared + kJoinWarps;
  wait_for_previous_kernel();
  let_next_kernel_begin();
  const core::Row row = row_of(params.batch, blockIdx.x, params.page_size, params.window);
  const int64_t row_head = int64_t{blockIdx.x} * params.num_kv_heads + blockIdx.y;
  const int64_t first_page = row.first_page(params.page_size);
  const int64_t num_pages = row.num_tokens / params.page_size - first_page;
  if (num_pages <= 0) return;
  const float* head_scores =
      params.head_scores + row_head * params.group_size * params.row_stride + first_page;
  for (int64_t g = 0; g < params.group_size; ++g) {
    const float lse = log_sum_exp_of_numbers(head_scores + g * params.row_stride, num_pages, shared);
    if (threadIdx.x == 0) lses[g] = lse;
  }
  __syncthreads();
  float* page_scores = params.page_scores + row_head * params.row_stride + first_page;
  for (int64_t i = threadIdx.x; i < num_pages; i += kJoinThreads) {
    const auto share = [&](int64_t g) { return log_share(head_scores[g * params.row_stride + i], lses[g]); };
    float max = -INFINITY;
    bool all_nothing = true;
    for (int64_t g = 0; g < params.group_size; ++g) {
      max = fmaxf(max, share(g));
      all_nothing = all_nothing && share(g) == -INFINITY;
    }
    const float shift = max == -INFINITY ? 0.0F : max;
    float sum = 0.0F;
    for (int64_t g = 0; g < params.group_size; ++g) sum += expf(share(g) - shift);
    page_scores[i] = all_nothing ? -INFINITY : shift + logf(sum);
  }
}

}  // namespace tinyserve::cuda
