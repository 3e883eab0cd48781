// Page scores from a query and the page summaries. A block takes a tile of a row's pages for one kv head:
// the lanes of a page read its summary once for as many query heads as registers allow. How the heads' scores
// become one is the group reduction's affair; the softmax needs all pages of the row and is a kernel of its
// own (join_scores.cuh).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/params.h"
#include "core/row.h"
#include "core/scorer.h"
#include "cuda/arch.cuh"
#include "cuda/row.cuh"
#include "cuda/score_vectors.cuh"

namespace tinyserve::cuda {

inline constexpr int kScoreThreads = 256;
// Blocks of a multiprocessor at least: leaves each thread the registers that four and more heads need.
inline constexpr int kScoreBlocks = 2;
inline constexpr int kScoreSlots = kScoreThreads / kPageLanes;  // pages scored at the same time

// Scoring: how a summary becomes the scores of kHeads query heads (LinearScoring). Grid: rows x kv heads x as
// many tiles as one likes.
template <typename Scoring>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    score_pages_kernel(const __grid_constant__ core::ScorePagesBatchParams params,
                       const __grid_constant__ core::Scorer scorer) {
  constexpr int kPages = Scoring::kPages;
  constexpr int kHeads = Scoring::kHeads;
  constexpr int kTilePages = kPages * kScoreSlots;
  TINYSERVE_DYNAMIC_SHARED(memory);
  float* features = reinterpret_cast<float*>(memory);
  wait_for_previous_kernel();
  let_next_kernel_begin();
  const core::Row row = row_of(params.batch, blockIdx.x, params.page_size, params.window);
  const int64_t head = blockIdx.y;
  const int64_t row_head = int64_t{blockIdx.x} * params.num_kv_heads + head;
  const int64_t first_head = head * params.group_size;
  const int lane = static_cast<int>(threadIdx.x % kPageLanes);
  const int slot = static_cast<int>(threadIdx.x / kPageLanes);

  const auto first_page = static_cast<int32_t>(row.first_page(params.page_size));
  const auto end_page = static_cast<int32_t>(row.end_page(params.page_size));
  // A page not full of visible tokens has no summary yet; it is the last one and always attended.
  const auto sealed_end = static_cast<int32_t>(row.num_tokens / params.page_size);
  const auto max_pages = static_cast<int32_t>(params.batch.max_pages);
  const int num_heads =
      params.group_reduction == core::GroupReduction::kMean ? 1 : static_cast<int>(params.group_size);
  int loaded_head = -1;

  for (int32_t tile = static_cast<int32_t>(blockIdx.z) * kTilePages; tile < max_pages;
       tile += static_cast<int32_t>(gridDim.z) * kTilePages) {
    const uint8_t* summaries[kPages];
    float best[kPages];
#pragma unroll
    for (int p = 0; p < kPages; ++p) {
      const int32_t page = tile + p * kScoreSlots + slot;
      const bool sealed = first_page <= page && page < sealed_end;
      const int32_t page_id = sealed ? row.page_table[page] : -1;
      summaries[p] = page_id >= 0 ? params.page_summary.row(page_id, head) : nullptr;
      best[p] = sealed_end <= page && page < end_page ? INFINITY : -INFINITY;
    }
    if (first_page < tile + kTilePages && tile < sealed_end) {
      for (int g0 = 0; g0 < num_heads; g0 += kHeads) {
        if (loaded_head != g0) {  // once, if a block has all heads
          if (loaded_head >= 0) __syncthreads();
          if (params.group_reduction == core::GroupReduction::kMean) {
            Scoring::load_mean_query(params, scorer, blockIdx.x, first_head, features);
          } else {
            Scoring::load_queries(params, scorer, blockIdx.x, first_head + g0, num_heads - g0, features);
          }
          __syncthreads();
          loaded_head = g0;
        }
        float scores[kPages][kHeads];
        Scoring::score(params, scorer, summaries, features, scores);
#pragma unroll
        for (int p = 0; p < kPages; ++p) {
          const int32_t page = tile + p * kScoreSlots + slot;
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            if (g0 + h >= num_heads) continue;
            const float score = summaries[p] != nullptr ? scores[p][h] : -INFINITY;
            if (params.group_reduction == core::GroupReduction::kSoftmax) {
              if (lane == h && first_page <= page && page < sealed_end) {
                params.head_scores[(row_head * params.group_size + g0 + h) * params.row_stride + page] =
                    score;
              }
            } else if (summaries[p] != nullptr && (score > best[p] || score != score)) {
              // NaN wins over every number, so that it stays visible and the selection ranks the page last.
              best[p] = score;
            }
          }
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kPages; ++p) {
      const int32_t page = tile + p * kScoreSlots + slot;
      const bool joined_later =
          params.group_reduction == core::GroupReduction::kSoftmax && first_page <= page && page < sealed_end;
      if (lane == 0 && page < max_pages && !joined_later) {
        params.page_scores[row_head * params.row_stride + page] = best[p];
      }
    }
  }
}

}  // namespace tinyserve::cuda
