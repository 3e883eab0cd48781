// Scores of the scorers that are linear in a feature of the query: one dot product per summary vector. The
// lanes of a page take eight channels each, the features lie in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/params.h"
#include "core/scorer.h"
#include "cuda/arch.cuh"
#include "cuda/codes.cuh"
#include "cuda/element.cuh"

namespace tinyserve::cuda {

inline constexpr int kPageLanes = 8;  // lanes that score a page together

// The sum over the lanes of a page, in the same order for each of them.
__device__ __forceinline__ float sum_page_lanes(float x) {
#pragma unroll
  for (int mask = kPageLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(kFullWarp, x, mask);
  return x;
}

__device__ __forceinline__ float load_query(const core::PackedView& q, int64_t row, int64_t head, int64_t d) {
  const int64_t i = row * q.token_stride + head * q.head_stride + d;
  switch (q.type) {
    case core::ElementType::kFloat16:
      return to_float(static_cast<const __half*>(q.data)[i]);
    case core::ElementType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(q.data)[i]);
    default:
      return static_cast<const float*>(q.data)[i];
  }
}

__device__ __forceinline__ float query_feature(float q, core::QueryFeature feature) {
  switch (feature) {
    case core::QueryFeature::kPositivePart:
      return q < 0.0F ? 0.0F : q;  // NaN stays NaN
    case core::QueryFeature::kNegativePart:
      return q > 0.0F ? 0.0F : q;
    case core::QueryFeature::kAbsolute:
      return q < 0.0F ? -q : q;
    case core::QueryFeature::kIdentity:
      break;
  }
  return q;
}

// Code: the type of a number of the summary, int8_t with a scale per vector.
template <typename Code, int kHeadBlock>
struct LinearScoring {
  static constexpr int kHeads = kHeadBlock;
  static constexpr int kPages = 2;  // of a lane: both use the features that it has read

  static constexpr int64_t shared_floats(const core::Scorer& scorer, int64_t head_dim) {
    return scorer.num_vectors * kHeads * head_dim;
  }

  // Where the features of a vector and head begin; the first halves of all eights, then the second ones, so
  // that the lanes of a page read consecutive quarters.
  static __device__ __forceinline__ int64_t place(int v, int h, int64_t head_dim, int64_t d) {
    return ((v * kHeads + h) * 2 + d % 8 / 4) * (head_dim / 2) + d / 8 * 4 + d % 4;
  }

  // Features of num_heads heads from query head first_head on, zeros for those that are missing in the block.
  static __device__ __forceinline__ void load_queries(const core::ScorePagesBatchParams& params,
                                                      const core::Scorer& scorer, int64_t row,
                                                      int64_t first_head, int64_t num_heads,
                                                      float* features) {
    const int64_t head_dim = params.head_dim;
    for (int64_t i = threadIdx.x; i < kHeads * head_dim; i += blockDim.x) {
      const int h = static_cast<int>(i / head_dim);
      const int64_t d = i % head_dim;
      const float q = h < num_heads ? load_query(params.q, row, first_head + h, d) * params.sm_scale : 0.0F;
      for (int v = 0; v < scorer.num_vectors; ++v) {
        features[place(v, h, head_dim, d)] =
            scorer.vectors[v].weight * query_feature(q, scorer.vectors[v].feature);
      }
    }
  }

  // The mean of a group's features, as if it were one head.
  static __device__ __forceinline__ void load_mean_query(const core::ScorePagesBatchParams& params,
                                                         const core::Scorer& scorer, int64_t row,
                                                         int64_t first_head, float* features) {
    const float share = 1.0F / static_cast<float>(params.group_size);
    for (int64_t d = threadIdx.x; d < params.head_dim; d += blockDim.x) {
      for (int v = 0; v < scorer.num_vectors; ++v) {
        const float weight = scorer.vectors[v].weight * share;
        float sum = 0.0F;
        for (int64_t g = 0; g < params.group_size; ++g) {
          const float q = load_query(params.q, row, first_head + g, d) * params.sm_scale;
          sum += weight * query_feature(q, scorer.vectors[v].feature);
        }
        features[place(v, 0, params.head_dim, d)] = sum;
      }
    }
  }

  // Scores of the summary rows, the same in all lanes of a page; a null row scores 0.
  static __device__ __forceinline__ void score(const core::ScorePagesBatchParams& params,
                                               const core::Scorer& scorer,
                                               const uint8_t* const (&summaries)[kPages],
                                               const float* features, float (&scores)[kPages][kHeads]) {
    const int lane = static_cast<int>(threadIdx.x % kPageLanes);
    const int head_dim = static_cast<int>(params.head_dim);
    const int64_t header_bytes = scorer.header_bytes();
#pragma unroll
    for (int p = 0; p < kPages; ++p) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) scores[p][h] = 0.0F;
    }
    for (int v = 0; v < scorer.num_vectors; ++v) {
      float sums[kPages][kHeads] = {};
      for (int unit = lane; unit < head_dim / 8; unit += kPageLanes) {
        const int64_t at = header_bytes + (v * head_dim + unit * 8) * int64_t{sizeof(Code)};
        EightCodes<Code> codes[kPages] = {};
#pragma unroll
        for (int p = 0; p < kPages; ++p) {
          if (summaries[p] != nullptr) codes[p].load(summaries[p] + at);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[kPages][4];
#pragma unroll
          for (int p = 0; p < kPages; ++p) codes[p].four(half, x[p]);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            const float4 f =
                *reinterpret_cast<const float4*>(features + place(v, h, head_dim, unit * 8 + half * 4));
#pragma unroll
            for (int p = 0; p < kPages; ++p) {
              sums[p][h] += f.x * x[p][0] + f.y * x[p][1] + f.z * x[p][2] + f.w * x[p][3];
            }
          }
        }
      }
      // Unscaled codes first: a scale near the largest float times a code may overflow.
#pragma unroll
      for (int p = 0; p < kPages; ++p) {
        float scale = 1.0F;
        if constexpr (std::is_same_v<Code, int8_t>) {
          if (summaries[p] != nullptr) scale = reinterpret_cast<const float*>(summaries[p])[v];
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) scores[p][h] += scale * sums[p][h];
      }
    }
#pragma unroll
    for (int p = 0; p < kPages; ++p) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) scores[p][h] = sum_page_lanes(scores[p][h]);
    }
  }
};

}  // namespace tinyserve::cuda
