// Scores of low-rank summaries: from the mean key and the sketch the lanes of a page find the logit of every
// token, and join them by their log-sum-exp, or take the greatest. Logits are held in units of ln 2.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/limits.h"
#include "core/params.h"
#include "core/scorer.h"
#include "cuda/arch.cuh"
#include "cuda/codes.cuh"
#include "cuda/score_vectors.cuh"

namespace tinyserve::cuda {

// The greatest of the lanes of a page; NaN loses.
__device__ __forceinline__ float max_page_lanes(float x) {
#pragma unroll
  for (int mask = kPageLanes / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, mask));
  return x;
}

// kBlocks: int4 blocks that the coefficients of a rank take at most. A lane has two tokens of each: a byte.
template <int kBlocks, int kHeadBlock>
struct LowRankScoring {
  static constexpr int kHeads = kHeadBlock;
  static constexpr int kPages = kBlocks == 1 ? 2 : 1;

  static constexpr int64_t padded(int64_t head_dim) {
    return (head_dim + core::kInt4Block - 1) / core::kInt4Block * core::kInt4Block;
  }
  static constexpr int64_t shared_floats(const core::Scorer&, int64_t head_dim) {
    return kHeads * padded(head_dim);
  }

  // Sixteen channels lie in quarters apart from each other, so that the lanes of a page read consecutive
  // fours.
  static __device__ __forceinline__ int place(int h, int head_dim, int d) {
    return (h * 4 + d % 16 / 4) * (static_cast<int>(padded(head_dim)) / 4) + d / 16 * 4 + d % 4;
  }

  static __device__ __forceinline__ void load_queries(const core::ScorePagesBatchParams& params,
                                                      const core::Scorer&, int64_t row, int64_t first_head,
                                                      int64_t num_heads, float* features) {
    const int head_dim = static_cast<int>(params.head_dim);
    const int channels = static_cast<int>(padded(head_dim));
    constexpr float kLog2OfE = 1.44269504F;
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * channels; i += static_cast<int>(blockDim.x)) {
      const int h = i / channels;
      const int d = i % channels;
      float q = 0.0F;  // behind the last channel, and of heads that are missing in the block
      if (h < num_heads && d < head_dim) q = load_query(params.q, row, first_head + h, d);
      if (fabsf(q) == INFINITY) q = NAN;  // a query that is not finite has no score
      features[place(h, head_dim, d)] = q * (params.sm_scale * kLog2OfE);
    }
  }

  // The mean of log-sum-exps is not one of a mean query: refused on the host.
  static __device__ __forceinline__ void load_mean_query(const core::ScorePagesBatchParams&,
                                                         const core::Scorer&, int64_t, int64_t, float*) {}

  // scale * dot product of each head's query with the codes that `load(unit, quarter, x)` gives, the same in
  // all lanes of a page.
  template <typename Load>
  static __device__ __forceinline__ void dot(const float* features, int head_dim, float scale,
                                             const Load& load, float (&sums)[kHeads]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] = 0.0F;
    for (int unit = static_cast<int>(threadIdx.x % kPageLanes); unit < (head_dim + 15) / 16;
         unit += kPageLanes) {
      float x[4][4];
      load(unit, x);
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float4 q =
              *reinterpret_cast<const float4*>(features + place(h, head_dim, unit * 16 + quarter * 4));
          sums[h] += q.x * x[quarter][0] + q.y * x[quarter][1] + q.z * x[quarter][2] + q.w * x[quarter][3];
        }
      }
    }
    // Products of codes first, the scale later: near the largest float it may overflow times a code.
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] = scale * sum_page_lanes(sums[h]);
  }

  static __device__ __forceinline__ float load_scale(const uint8_t* scales, int i) {
    return __uint_as_float(uint32_t{reinterpret_cast<const uint16_t*>(scales)[i]} << 16);
  }

  static __device__ __forceinline__ void score_page(const core::ScorePagesBatchParams& params,
                                                    const core::Scorer& scorer, const uint8_t* summary,
                                                    const float* features, float (&scores)[kHeads]) {
    const int lane = static_cast<int>(threadIdx.x % kPageLanes);
    const int head_dim = static_cast<int>(params.head_dim);
    const int page_size = static_cast<int>(params.page_size);
    const core::LowRankLayout layout = scorer.low_rank_layout(head_dim, page_size);
    const bool there = summary != nullptr;
    const uint8_t* scales = summary + (there ? layout.scales : 0);
    float shift[kHeads];
    // Behind an odd last eight follow bytes of the row, where the query is 0.
    dot(
        features, head_dim, there ? load_scale(scales, 0) : 0.0F,
        [&](int unit, float (&x)[4][4]) {
          uint4 words = {};
          if (there) words = *reinterpret_cast<const uint4*>(summary + unit * 16);
          widen_word<int8_t>(words.x, x[0]);
          widen_word<int8_t>(words.y, x[1]);
          widen_word<int8_t>(words.z, x[2]);
          widen_word<int8_t>(words.w, x[3]);
        },
        shift);

    float logits[kBlocks][2][kHeads] = {};
#pragma unroll 1
    for (int r = 0; r < scorer.rank; ++r) {
      float along[kHeads];
      dot(
          features, head_dim, there ? load_scale(scales, 1 + r) : 0.0F,
          [&](int unit, float (&x)[4][4]) {
            uint2 words = {};
            if (there) {
              words = *reinterpret_cast<const uint2*>(summary + layout.basis + r * layout.basis_bytes +
                                                      unit * core::kInt4BlockBytes);
            }
            nibbles(words.x, false, x[0]);
            nibbles(words.y, false, x[1]);
            nibbles(words.x, true, x[2]);
            nibbles(words.y, true, x[3]);
          },
          along);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (!there || block * core::kInt4Block >= page_size) continue;
        const uint32_t byte = summary[layout.coefficients + r * layout.coefficient_bytes +
                                      block * core::kInt4BlockBytes + lane];
        const float low = byte_to_float(byte & 15U, 0, 8.0F);
        const float high = byte_to_float(byte >> 4, 0, 8.0F);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          logits[block][0][h] += along[h] * low;
          logits[block][1][h] += along[h] * high;
        }
      }
    }

    constexpr float kLn2 = 0.693147181F;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float max = -INFINITY;
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        if (i * 8 + lane < page_size) max = fmaxf(max, logits[i / 2][i % 2][h]);
      }
      max = max_page_lanes(max);
      scores[h] = kLn2 * (shift[h] + max);
      if (scorer.token_reduction == core::TokenReduction::kMax) continue;
      // Logits that are all -inf are taken relative to 0: -inf less -inf would be NaN.
      const float relative_to = max == -INFINITY ? 0.0F : max;
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        if (i * 8 + lane < page_size) sum += exp2f(logits[i / 2][i % 2][h] - relative_to);
      }
      sum = sum_page_lanes(sum);
      if (scores[h] != INFINITY) scores[h] += logf(sum);
    }
  }

  static __device__ __forceinline__ void score(const core::ScorePagesBatchParams& params,
                                               const core::Scorer& scorer,
                                               const uint8_t* const (&summaries)[kPages],
                                               const float* features, float (&scores)[kPages][kHeads]) {
#pragma unroll
    for (int p = 0; p < kPages; ++p) score_page(params, scorer, summaries[p], features, scores[p]);
  }
};

}  // namespace tinyserve::cuda
