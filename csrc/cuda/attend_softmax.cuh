// The running softmax that attend_pages is made of: numerators relative to a maximum that grows, and the
// log-sum-exp of single pages.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_ring.cuh"
#include "cuda/attend_work.cuh"

namespace tinyserve::cuda {

// What numerators are taken relative to: 0 where no logit is finite, so that exp gives 0 and not NaN.
__device__ __forceinline__ float shift_of(float max) { return max == -INFINITY ? 0.0F : max; }

// The factor that brings numerators relative to `max` to those relative to `shift`. A NaN sum counts whatever
// its max.
__device__ __forceinline__ float weight_of(float max, float sum, float shift) {
  return sum == 0.0F ? 0.0F : __expf(shift_of(max) - shift);
}

__device__ __forceinline__ float log_sum_exp(float max, float sum) {
  return sum == 0.0F ? -INFINITY : shift_of(max) + logf(sum);
}

// The log-sum-exp of each page of a tile and head, from the logits [kTokens][kHeads] in `logits`. A page in
// several tiles is carried by the lane of its head.
struct PageLse {
  float max = -INFINITY;
  float sum = 0.0F;
};
template <int kHeads>
__device__ __forceinline__ void write_page_lse(const core::AttendPagesParams& attend, const AttendWork& work,
                                               const TileSteps& steps, const Tile& tile, const float* logits,
                                               PageLse& carried) {
  const int num_heads = min(kHeads, static_cast<int>(attend.group_size) - work.first_query_head);
  const int num_pages = min(steps.pages, work.num_pages - tile.entry);
  const int tokens = min(steps.page_size - tile.first_slot, kAttendTileTokens);
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < num_pages * num_heads; i += kWarpSize) {
    const int page = i / num_heads;
    const int h = i % num_heads;
    const float* page_logits = logits + page * steps.page_size * kHeads + h;
    PageLse lse = tile.first_slot == 0 ? PageLse{} : carried;
    const float max_before = lse.max;
    for (int t = 0; t < tokens; ++t) lse.max = fmaxf(lse.max, page_logits[t * kHeads]);
    lse.sum *= weight_of(max_before, lse.sum, shift_of(lse.max));
    for (int t = 0; t < tokens; ++t) lse.sum += __expf(page_logits[t * kHeads] - shift_of(lse.max));
    carried = lse;
    if (tile.first_slot + tokens < steps.page_size) continue;
    const int64_t query_head = work.row_head * attend.group_size + work.first_query_head + h;
    attend.page_lse[query_head * attend.list_width + work.first_entry + tile.entry + page] =
        log_sum_exp(lse.max, lse.sum);
  }
}

}  // namespace tinyserve::cuda
