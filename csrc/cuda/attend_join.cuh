// How partial results of attend_pages become one: those of a block's warps, then, by the last block of a row
// and kv head, those of the chunks. Always in index order, so that no bit depends on who was first.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_chunks.h"
#include "cuda/attend_softmax.cuh"
#include "cuda/attend_work.cuh"
#include "cuda/element.cuh"

namespace tinyserve::cuda {

// Bytes of shared memory that the last block takes to join the chunks of `group_size` heads.
constexpr int merge_bytes(int group_size) {
  return 16 + group_size * (static_cast<int>(kMaxChunks) + 1) * static_cast<int>(sizeof(float));
}

// The partial result of a chunk: acc [group_size, head_dim], max [group_size], sum [group_size].
__device__ __forceinline__ float* partial_of(const core::AttendPagesParams& attend, int64_t row_head,
                                             int64_t chunk) {
  return attend.partials + (row_head * attend.max_chunks + chunk) * attend.group_size * (attend.head_dim + 2);
}

// What the warps of a block have found, in shared memory: of each warp and head acc, relative to max, and
// sum.
struct WarpStates {
  int num_warps;
  float* maxima;   // [num_warps][heads of the block]
  float* sums;     // likewise
  float* weights;  // likewise; filled here
  const unsigned char* accs;
  int acc_stride;  // bytes from warp to warp
};

// Joins them to the partial result of the block's chunk.
template <int kHeads>
__device__ __forceinline__ void join_warps(const core::AttendPagesParams& attend, const AttendWork& work,
                                           int head_dim, const WarpStates& states) {
  const int num_heads = min(kHeads, static_cast<int>(attend.group_size) - work.first_query_head);
  float* partial = partial_of(attend, work.row_head, work.chunk);
  if (static_cast<int>(threadIdx.x) < num_heads) {
    const int h = static_cast<int>(threadIdx.x);
    float max = -INFINITY;
    for (int w = 0; w < states.num_warps; ++w) max = fmaxf(max, states.maxima[w * kHeads + h]);
    float sum = 0.0F;
    for (int w = 0; w < states.num_warps; ++w) {
      const int i = w * kHeads + h;
      states.weights[i] = weight_of(states.maxima[i], states.sums[i], shift_of(max));
      sum += states.weights[i] * states.sums[i];
    }
    float* chunk_maxima = partial + attend.group_size * head_dim + work.first_query_head;
    chunk_maxima[h] = max;
    chunk_maxima[attend.group_size + h] = sum;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_heads * head_dim; i += static_cast<int>(blockDim.x)) {
    float acc = 0.0F;
    for (int w = 0; w < states.num_warps; ++w) {
      const auto* warp_acc = reinterpret_cast<const float*>(states.accs + w * states.acc_stride);
      acc = fmaf(states.weights[w * kHeads + i / head_dim], warp_acc[i], acc);
    }
    partial[work.first_query_head * head_dim + i] = acc;
  }
}

__device__ __forceinline__ void store_output(const core::AttendPagesParams& attend, int64_t index, float x) {
  switch (attend.q.type) {
    case core::ElementType::kFloat16:
      return from_float(x, static_cast<__half*>(attend.out)[index]);
    case core::ElementType::kBFloat16:
      return from_float(x, static_cast<__nv_bfloat16*>(attend.out)[index]);
    default:
      return from_float(x, static_cast<float*>(attend.out)[index]);
  }
}

// The result of a row and kv head from the partial results of its chunks; without one, zeros and -inf.
// `shared`: merge_bytes() of it.
__device__ __forceinline__ void join_chunks(const core::AttendPagesParams& attend, int64_t row_head,
                                            int num_chunks, int head_dim, unsigned char* shared) {
  const int group_size = static_cast<int>(attend.group_size);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  const float* partials = partial_of(attend, row_head, 0);
  const int64_t stride = attend.group_size * (attend.head_dim + 2);
  auto* weights = reinterpret_cast<float*>(shared + 16);  // [group_size][kMaxChunks]
  float* inverses = weights + group_size * kMaxChunks;
  for (int g = warp; g < group_size; g += num_warps) {
    constexpr int kPerLane = static_cast<int>(kMaxChunks) / kWarpSize;
    float maxima[kPerLane];
    float sums[kPerLane];
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int chunk = i * kWarpSize + lane;
      const bool there = chunk < num_chunks;
      const float* state = partials + chunk * stride + group_size * head_dim + g;
      maxima[i] = there ? state[0] : -INFINITY;
      sums[i] = there ? state[group_size] : 0.0F;
      max = fmaxf(max, maxima[i]);
    }
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float weight = weight_of(maxima[i], sums[i], shift_of(max));
      sum += weight * sums[i];
      weights[g * kMaxChunks + i * kWarpSize + lane] = weight;
    }
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0) {
      inverses[g] = sum == 0.0F ? 0.0F : 1.0F / sum;
      attend.lse[row_head * group_size + g] = log_sum_exp(max, sum);
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < group_size * head_dim; i += static_cast<int>(blockDim.x)) {
    const int g = i / head_dim;
    float merged = 0.0F;
#pragma unroll 8
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      merged = fmaf(weights[g * kMaxChunks + chunk], partials[chunk * stride + i], merged);
    }
    store_output(attend, row_head * group_size * head_dim + i, merged * inverses[g]);
  }
}

// Whether this block is the last of its row and kv head; all threads get the answer. The counter makes the
// partial results of the others visible, and is left at zero for the next launch.
__device__ __forceinline__ bool is_last(const core::AttendPagesParams& attend, int64_t row_head,
                                        unsigned num_blocks, unsigned char* shared) {
  auto* last = reinterpret_cast<int*>(shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* counter = attend.chunks_done + row_head;
    *last = num_blocks == 1 || fetch_add_acq_rel(reinterpret_cast<uint32_t*>(counter), 1) == num_blocks - 1;
    if (*last != 0 && num_blocks != 1) *counter = 0;
  }
  __syncthreads();
  return *last != 0;
}

}  // namespace tinyserve::cuda
