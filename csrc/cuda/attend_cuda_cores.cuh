// Products of attend_pages in fp32 on CUDA cores: for pages of any type and queries of any type and head_dim.
// Four lanes share the dot products of a token and end with the logits of a quarter of the heads each; of the
// output a lane has some channels of every head.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/limits.h"
#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_ring.cuh"
#include "cuda/attend_softmax.cuh"
#include "cuda/attend_work.cuh"
#include "cuda/element.cuh"
#include "cuda/vector_load.cuh"

namespace tinyserve::cuda {

inline constexpr int kTokenLanes = 4;  // lanes that share the dot products of a token

// Adds up `x` over the lanes of a token; each lane ends with its share of the heads, the one of number
// lane % kTokenLanes * kLaneHeads first.
template <int kHeads>
__device__ __forceinline__ void share_heads(float (&x)[kHeads]) {
  static_assert(kTokenLanes == 4, "Two exchanges join four lanes.");
  const unsigned lane = threadIdx.x % kWarpSize;
  if constexpr (kHeads == 1) {
    x[0] += __shfl_xor_sync(kFullWarp, x[0], 2);
    x[0] += __shfl_xor_sync(kFullWarp, x[0], 1);
  } else {
    const bool second_half = (lane & 2U) != 0;
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) {
      const float given = second_half ? x[i] : x[i + kHeads / 2];
      const float kept = second_half ? x[i + kHeads / 2] : x[i];
      x[i] = kept + __shfl_xor_sync(kFullWarp, given, 2);
    }
    const bool second_quarter = (lane & 1U) != 0;
#pragma unroll
    for (int i = 0; i < kHeads / 4; ++i) {
      const float given = second_quarter ? x[i] : x[i + kHeads / 4];
      const float kept = second_quarter ? x[i + kHeads / 4] : x[i];
      x[i] = kept + __shfl_xor_sync(kFullWarp, given, 1);
    }
  }
}

// The largest of the tokens' values, NaN aside, and their sum: over the lanes that hold the same heads.
__device__ __forceinline__ float max_over_tokens(float x) {
#pragma unroll
  for (int step = kTokenLanes; step < kWarpSize; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}
__device__ __forceinline__ float sum_over_tokens(float x) {
#pragma unroll
  for (int step = kTokenLanes; step < kWarpSize; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

template <typename T_, int kHeads_, int kHeadDim_>
struct CudaCoreProducts {
  using T = T_;                               // of the pages
  using Query = float;                        // as they lie in shared memory
  static constexpr int kHeads = kHeads_;      // query heads of a block
  static constexpr int kHeadDim = kHeadDim_;  // 0: known at run time
  static constexpr int kMaxHeadDim = kHeadDim == 0 ? static_cast<int>(core::kMaxHeadDim) : kHeadDim;
  static constexpr bool kInt8 = std::is_same_v<T, int8_t>;

  // Of the output a lane has kSlices times kChannels neighbouring channels.
  static constexpr int kChannels = kHeadDim == 64 ? 2 : 4;
  static constexpr int kSlices = kMaxHeadDim / (kChannels * kWarpSize);
  // Of the logits of its tokens a lane ends with those of so many heads.
  static constexpr int kLaneHeads = kHeads == 1 ? 1 : kHeads / kTokenLanes;

  // Blocks of an SM that registers must leave room for; shared memory leaves none for more. Left to itself
  // the compiler makes room for others and spills.
  static constexpr int kMinBlocks = kHeadDim == 0 || (kHeadDim == 128 && kHeads == 8) ? 2 : 3;

  // Gaps behind rows in shared memory, in elements: lanes at neighbouring tokens meet other banks.
  static constexpr int kQueryGap = 0;
  static constexpr int kKeyGap = 8 * kTokenLanes;
  static constexpr int kValueGap = 0;

  static_assert(kHeads == 1 || kHeads % kTokenLanes == 0, "The lanes of a token share its heads evenly.");
  static_assert(kSlices * kChannels * kWarpSize == kMaxHeadDim, "The lanes cover the channels exactly.");
  static_assert(core::kHeadDimMultiple % kChannels == 0,
                "A lane's neighbouring channels are all there or none.");

  // A warp's own shared memory: numerators [kAttendTileTokens][kHeads], rescales [kHeads].
  static constexpr bool kQueriesInRegisters = false;
  static constexpr int kScratchFloats = kAttendTileTokens * kHeads + (kHeads + 3) / 4 * 4;

  // Of the lane's tokens (lane / kTokenLanes and the one 8 behind), its share of the heads first.
  struct Logits {
    float x[2][kHeads];
  };

  const float* queries;  // [kHeads][head_dim], times sm_scale
  int head_dim;
  float* scratch;
  // The running softmax of the warp. acc, relative to max, is spread over all lanes by channels; max and sum
  // over the lanes of its tokens by heads, where each lane has summed its own tokens only.
  float acc[kHeads][kSlices][kChannels] = {};
  float max[kLaneHeads];
  float sum[kLaneHeads];

  static __device__ __forceinline__ float shared_query(float q, float sm_scale) { return q * sm_scale; }

  __device__ __forceinline__ CudaCoreProducts(const float* block_queries, int channels, float,
                                              float* warp_scratch)
      : queries(block_queries), head_dim(channels), scratch(warp_scratch) {
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      max[h] = -INFINITY;
      sum[h] = 0.0F;
    }
  }

  __device__ __forceinline__ Logits logits(const LoadedTile<T>& tile) const {
    const int part = lane() % kTokenLanes;
    const int k_pitch = head_dim + kKeyGap;
    const T* first = tile.keys + token() * k_pitch;
    const T* second = first + kAttendTileTokens / 2 * k_pitch;
    Logits out;
    float (&dots)[2][kHeads] = out.x;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) dots[0][h] = dots[1][h] = 0.0F;
    constexpr int kSteps = kMaxHeadDim / (8 * kTokenLanes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int d = 8 * (step * kTokenLanes + part);
      if (kHeadDim == 0 && d >= head_dim) break;
      float k[2][8];
      load_vector(first + d, k[0]);
      load_vector(second + d, k[1]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float q[8];
        load_vector(queries + h * head_dim + d, q);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          dots[0][h] = fmaf(q[i], k[0][i], dots[0][h]);
          dots[1][h] = fmaf(q[i], k[1][i], dots[1][h]);
        }
      }
    }
    share_heads(dots[0]);
    share_heads(dots[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = token() + i * (kAttendTileTokens / 2);
#pragma unroll
      for (int h = 0; h < kLaneHeads; ++h) {
        if constexpr (kInt8) dots[i][h] *= tile.scales[t];
        if ((tile.seen >> t & 1U) == 0) dots[i][h] = -INFINITY;
      }
    }
    return out;
  }

  // To scratch, [kAttendTileTokens][kHeads].
  __device__ __forceinline__ void store_logits(const Logits& logits) const {
    if (!writes_heads()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < kLaneHeads; ++h) {
        const int t = token() + i * (kAttendTileTokens / 2);
        scratch[t * kHeads + first_head() + h] = logits.x[i][h];
      }
    }
  }

  __device__ __forceinline__ void add(const LoadedTile<T>& tile, const Logits& logits) {
    float* rescales = scratch + kAttendTileTokens * kHeads;
    bool rescale = false;
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      const float before = max[h];
      max[h] = fmaxf(before, max_over_tokens(fmaxf(logits.x[0][h], logits.x[1][h])));
      const float shift = shift_of(max[h]);
      const float factor = __expf(before - shift);
      const float p[2] = {__expf(logits.x[0][h] - shift), __expf(logits.x[1][h] - shift)};
      sum[h] = sum[h] * factor + (p[0] + p[1]);
      rescale |= before != max[h];
      if (!writes_heads()) continue;
      if (token() == 0) rescales[first_head() + h] = factor;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = token() + i * (kAttendTileTokens / 2);
        float weight = p[i];
        if constexpr (kInt8) weight *= tile.scales[kAttendTileTokens + t];
        scratch[t * kHeads + first_head() + h] = weight;
      }
    }
    rescale = __any_sync(kFullWarp, rescale) != 0;
    __syncwarp();
    if (rescale) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float factor = rescales[h];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
#pragma unroll
          for (int i = 0; i < kChannels; ++i) acc[h][s][i] *= factor;
        }
      }
    }
#pragma unroll 4
    for (int t = 0; t < kAttendTileTokens; ++t) {
      float p[kHeads];
      load_vector(scratch + t * kHeads, p);
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        const int d = (s * kWarpSize + lane()) * kChannels;
        if (kHeadDim == 0 && d >= head_dim) continue;
        float v[kChannels];
        load_vector(tile.values + t * head_dim + d, v);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
          for (int i = 0; i < kChannels; ++i) acc[h][s][i] = fmaf(p[h], v[i], acc[h][s][i]);
        }
      }
    }
  }

  // Writes the state of the warp: acc [kHeads][head_dim], maxima [kHeads], sums [kHeads].
  __device__ __forceinline__ void store(float* accs, float* maxima, float* sums) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        const int d = (s * kWarpSize + lane()) * kChannels;
        if (kHeadDim == 0 && d >= head_dim) continue;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) accs[h * head_dim + d + i] = acc[h][s][i];
      }
    }
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      const float total = sum_over_tokens(sum[h]);
      if (token() != 0 || !writes_heads()) continue;
      maxima[first_head() + h] = max[h];
      sums[first_head() + h] = total;
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  static __device__ __forceinline__ int token() { return lane() / kTokenLanes; }
  static __device__ __forceinline__ int first_head() {  // of the lane's
    return kHeads == 1 ? 0 : lane() % kTokenLanes * kLaneHeads;
  }
  static __device__ __forceinline__ bool writes_heads() { return kHeads > 1 || lane() % kTokenLanes == 0; }
};

}  // namespace tinyserve::cuda
