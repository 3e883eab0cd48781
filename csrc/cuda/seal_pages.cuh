// Computes the summaries of full pages anew, one warp for each page and kv head.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/scorer.h"
#include "cuda/arch.cuh"
#include "cuda/summarise.cuh"

namespace tinyserve::cuda {

inline constexpr int kSealWarps = 4;  // of a block, at most

// Four blocks an SM: left alone, ptxas keeps to 64 registers and spills two of them.
// T: element type of the pages. The scorer comes by value: params.scorer is the host's.
template <typename T, bool kLowRank>
__global__ void __launch_bounds__(kSealWarps* kWarpSize, 4)
    seal_pages_kernel(const __grid_constant__ core::SealPagesParams params, int64_t num_page_ids,
                      const __grid_constant__ core::Scorer scorer, int64_t warp_bytes) {
  TINYSERVE_DYNAMIC_SHARED(shared);
  const int64_t warp = threadIdx.x / kWarpSize;
  const int64_t item = int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + warp;
  if (item >= num_page_ids * params.num_kv_heads) return;
  const int64_t head = item % params.num_kv_heads;
  const int64_t page_id = params.page_ids[item / params.num_kv_heads];
  seal_page<T, kLowRank>(params.k_pages, page_id, head, params.page_size, params.head_dim, scorer,
                         params.page_summary.row(page_id, head), shared + warp * warp_bytes);
}

}  // namespace tinyserve::cuda
