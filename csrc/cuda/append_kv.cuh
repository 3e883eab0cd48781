// Writes new keys and values into their pages and seals each page that fills. One warp serves one kv head of
// a run: the new tokens of a sequence that fall into one page. The warp of a run's first token does all of it
// and those of the others end at once, so that a page has one writer, which can seal it without waiting for
// anybody. A step of decoding has one token per run, and loses nothing.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/scorer.h"
#include "cuda/arch.cuh"
#include "cuda/batch.cuh"
#include "cuda/summarise.cuh"
#include "cuda/warp_row.cuh"

namespace tinyserve::cuda {

inline constexpr int kAppendWarps = 4;  // heads of a block

// T: element type of the pages. The scorer comes by value (params.scorer is the host's), for a null
// page_summary any. Grid: num_tokens x heads in blocks of as many as there are warps.
// Left alone, ptxas spills to keep to 64 registers; fitting a sketch takes more, and shared memory anyway.
template <typename T, bool kLowRank>
__global__ void __launch_bounds__(kAppendWarps* kWarpSize, kLowRank ? 4 : 8)
    append_kv_kernel(const __grid_constant__ core::AppendKvBatchParams params,
                     const __grid_constant__ core::Scorer scorer, int64_t warp_bytes) {
  TINYSERVE_DYNAMIC_SHARED(shared);
  wait_for_previous_kernel();
  let_next_kernel_begin();
  const int64_t token = blockIdx.x;
  const int64_t head = blockIdx.y * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
  if (head >= params.num_kv_heads) return;
  const PageRun run = run_from(params.batch, token, params.page_size);
  if (run.page_id < 0) return;
  for (int64_t i = 0; i < run.num_tokens; ++i) {
    const WarpRow k = load_row(params.k, token + i, head, params.head_dim);
    const WarpRow v = load_row(params.v, token + i, head, params.head_dim);
    store_row<T>(v, params.v_pages, run.page_id, head, run.first_slot + i, params.head_dim);
    store_row<T>(k, params.k_pages, run.page_id, head, run.first_slot + i, params.head_dim);
  }
  if (params.page_summary.data == nullptr || run.first_slot + run.num_tokens != params.page_size) return;
  __syncwarp();  // the scales of int8 rows were written by lane 0
  seal_page<T, kLowRank>(params.k_pages, run.page_id, head, params.page_size, params.head_dim, scorer,
                         params.page_summary.row(run.page_id, head),
                         shared + threadIdx.x / kWarpSize * warp_bytes);
}

}  // namespace tinyserve::cuda
