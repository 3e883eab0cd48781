// Products of attend_pages on tensor cores: pages and queries of the same 16-bit type. Sixteen query heads
// are the rows of both products, tokens the columns of the logits, channels those of the output; what a group
// lacks of sixteen is zeros. The logits lie in registers as the second product wants its rows, so nothing is
// exchanged but the maxima of four lanes.
//
// Queries are not scaled but their logits, so products are exact. Probabilities are rounded to the type of
// the pages, and what the rounding adds to their sum is taken back: they still add up to 1.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_ring.cuh"
#include "cuda/attend_softmax.cuh"
#include "cuda/attend_work.cuh"
#include "cuda/codes.cuh"
#include "cuda/element.cuh"

namespace tinyserve::cuda {

template <typename T_, int kHeadDim_>
struct TensorCoreProducts {
  using T = T_;
  using Query = T;
  static constexpr int kHeads = 16;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kMaxHeadDim = kHeadDim;
  // Blocks of an SM that registers must leave room for. Two of head_dim 128 have 139 KB of copies under way,
  // more than an SM's share of any memory needs; three would spill.
  static constexpr int kMinBlocks = kHeadDim == 64 ? 3 : 2;
  // Gaps behind rows in shared memory: eight neighbouring rows, which one ldmatrix takes, meet other banks.
  static constexpr int kQueryGap = 8;
  static constexpr int kKeyGap = 8;
  static constexpr int kValueGap = 8;

  static constexpr bool kQueriesInRegisters = true;
  static constexpr int kScratchFloats = kAttendTileTokens * kHeads;  // of a warp, for logits

  static_assert(sizeof(T) == 2, "Tensor cores take 16-bit elements here.");
  static_assert(kHeadDim % 16 == 0, "Channels come by sixteen.");
  static_assert(kAttendTileTokens == 16, "A tile is one step of the second product.");

  // Of eight tokens each, as mma_m16n8k16 leaves them: heads g and g + 8, tokens 2 c and the next.
  struct Logits {
    float x[2][4];
  };

  float sm_scale;
  float* scratch;
  uint32_t queries[kHeadDim / 16][4];
  float acc[kHeadDim / 8][4] = {};  // of eight channels each, relative to max
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};      // of the lane's own tokens
  float rounded[2] = {};  // the same after rounding

  static __device__ __forceinline__ T shared_query(float q, float) {
    T out;
    from_float(q, out);  // which it was
    return out;
  }

  __device__ __forceinline__ TensorCoreProducts(const T* block_queries, int, float scale, float* warp_scratch)
      : sm_scale(scale), scratch(warp_scratch) {
    const T* row = block_queries + lane() % 16 * (kHeadDim + kQueryGap) + lane() / 16 * 8;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) ldmatrix(queries[step], row + step * 16);
  }

  __device__ __forceinline__ Logits logits(const LoadedTile<T>& tile) const {
    // The lower and upper eight channels of a step for eight tokens, then for the other eight.
    const int first_token = lane() / 16 * 8 + lane() % 8;
    const T* row = tile.keys + first_token * (kHeadDim + kKeyGap) + lane() / 8 % 2 * 8;
    Logits out = {};
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t keys[4];
      ldmatrix(keys, row + step * 16);
      mma_m16n8k16<T>(out.x[0], queries[step], {keys[0], keys[1]});
      mma_m16n8k16<T>(out.x[1], queries[step], {keys[2], keys[3]});
    }
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = (tile.seen >> (eight * 8 + column() + i % 2) & 1U) != 0;
        out.x[eight][i] = seen ? out.x[eight][i] * sm_scale : -INFINITY;
      }
    }
    return out;
  }

  // To scratch, [kAttendTileTokens][kHeads].
  __device__ __forceinline__ void store_logits(const Logits& logits) const {
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scratch[(eight * 8 + column() + i % 2) * kHeads + head() + i / 2 * 8] = logits.x[eight][i];
      }
    }
  }

  __device__ __forceinline__ void add(const LoadedTile<T>& tile, const Logits& logits) {
    uint32_t probabilities[4];
    float factors[2];
    bool rescale = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x[4] = {logits.x[0][2 * half], logits.x[0][2 * half + 1], logits.x[1][2 * half],
                          logits.x[1][2 * half + 1]};
      const float before = max[half];
      max[half] = fmaxf(before, max_of_head(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))));
      const float shift = shift_of(max[half]);
      factors[half] = __expf(before - shift);
      rescale |= before != max[half];
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] = __expf(x[i] - shift);
      probabilities[half] = narrow_pair<T>(p[0], p[1]);
      probabilities[half + 2] = narrow_pair<T>(p[2], p[3]);
      float r[4];
      widen_word<T>(probabilities[half], r);
      widen_word<T>(probabilities[half + 2], r + 2);
      sum[half] = sum[half] * factors[half] + ((p[0] + p[1]) + (p[2] + p[3]));
      rounded[half] = rounded[half] * factors[half] + ((r[0] + r[1]) + (r[2] + r[3]));
    }
    if (__any_sync(kFullWarp, rescale) != 0) scale_acc(factors);
    // The lower and upper eight tokens of eight channels, then of the next eight.
    const T* row = tile.values + lane() % 16 * (kHeadDim + kValueGap) + lane() / 16 * 8;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t values[4];
      ldmatrix<4, /*kTransposed=*/true>(values, row + step * 16);
      mma_m16n8k16<T>(acc[2 * step], probabilities, {values[0], values[1]});
      mma_m16n8k16<T>(acc[2 * step + 1], probabilities, {values[2], values[3]});
    }
  }

  // Writes the state of the warp: acc [kHeads][head_dim], maxima [kHeads], sums [kHeads].
  __device__ __forceinline__ void store(float* accs, float* maxima, float* sums) {
    float corrections[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float exact = sum_of_head(sum[half]);
      const float in_acc = sum_of_head(rounded[half]);
      corrections[half] = in_acc == 0.0F ? 0.0F : exact / in_acc;
      if (lane() % 4 != 0) continue;
      maxima[head() + half * 8] = max[half];
      sums[head() + half * 8] = exact;
    }
    scale_acc(corrections);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        accs[(head() + i / 2 * 8) * kHeadDim + n * 8 + column() + i % 2] = acc[n][i];
      }
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  static __device__ __forceinline__ int head() { return lane() / 4; }  // and the one 8 behind
  static __device__ __forceinline__ int column() { return lane() % 4 * 2; }

  __device__ __forceinline__ void scale_acc(const float (&factors)[2]) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] *= factors[i / 2];
    }
  }

  // Over the four lanes that hold a head's tokens; NaN loses.
  static __device__ __forceinline__ float max_of_head(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
  }
  static __device__ __forceinline__ float sum_of_head(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
  }
};

template <typename Products>
inline constexpr bool kOnTensorCores = false;
template <typename T, int kHeadDim>
inline constexpr bool kOnTensorCores<TensorCoreProducts<T, kHeadDim>> = true;

}  // namespace tinyserve::cuda
