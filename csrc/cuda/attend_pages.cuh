// Attention of one query row over a list of pages. A block takes one chunk of the list for one kv head and
// some of its query heads (attend_work.cuh); its warps take the chunk's pages in turns and work on their own,
// each with a ring of tiles in shared memory (attend_ring.cuh), the products of its kernel
// (attend_cuda_cores.cuh, attend_tensor_cores.cuh) and a running softmax. The block joins its warps, and the
// last block of a row and kv head joins the chunks (attend_join.cuh).
#pragma once

#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_chunks.h"
#include "cuda/attend_cuda_cores.cuh"
#include "cuda/attend_join.cuh"
#include "cuda/attend_ring.cuh"
#include "cuda/attend_softmax.cuh"
#include "cuda/attend_tensor_cores.cuh"
#include "cuda/attend_work.cuh"
#include "cuda/element.cuh"

namespace tinyserve::cuda {

// Shared memory of a block: the queries, the states of the warps, then for each warp its ring and its
// scratch. Scratch lies over the queries where those move on to registers.
template <typename Products>
struct AttendLayout {
  int head_dim;
  int num_warps;

  static constexpr int kHeads = Products::kHeads;
  static constexpr int kFloat = static_cast<int>(sizeof(float));
  static constexpr int kScratchBytes = Products::kScratchFloats * kFloat;

  constexpr StageLayout<typename Products::T> stage() const {
    return {.head_dim = head_dim,
            .k_pitch = head_dim + Products::kKeyGap,
            .v_pitch = head_dim + Products::kValueGap};
  }
  // Within a warp's part, after its ring.
  constexpr int rows() const { return kAttendStages * stage().bytes(); }  // int64 [2][kAttendTileTokens]
  constexpr int rows_end() const {
    return rows() + 2 * kAttendTileTokens * static_cast<int>(sizeof(int64_t));
  }
  constexpr int warp_bytes() const {
    return rows_end() + (Products::kQueriesInRegisters ? 0 : kScratchBytes);
  }
  // Within the block.
  constexpr int query_pitch() const { return head_dim + Products::kQueryGap; }
  constexpr int queries() const { return 16; }  // after the flag of is_last()
  constexpr int states() const {                // float [3][num_warps][kHeads]: WarpStates
    const int query_bytes = kHeads * query_pitch() * static_cast<int>(sizeof(typename Products::Query));
    const int scratch_bytes = Products::kQueriesInRegisters ? num_warps * kScratchBytes : 0;
    return queries() + (query_bytes > scratch_bytes ? query_bytes : scratch_bytes);
  }
  constexpr int warps() const { return (states() + 3 * num_warps * kHeads * kFloat + 127) / 128 * 128; }
  constexpr int scratch(int warp) const {
    return Products::kQueriesInRegisters ? queries() + warp * kScratchBytes
                                         : warps() + warp * warp_bytes() + rows_end();
  }
  constexpr int bytes() const { return warps() + num_warps * warp_bytes(); }
};

// One element of a query head; 0 of heads that are missing in the group.
__device__ __forceinline__ float load_query(const core::AttendPagesParams& attend, const AttendWork& work,
                                            int h, int d) {
  const int g = work.first_query_head + h;
  if (g >= attend.group_size) return 0.0F;
  const int64_t offset =
      work.row_idx * attend.q.token_stride + (work.head * attend.group_size + g) * attend.q.head_stride + d;
  switch (attend.q.type) {
    case core::ElementType::kFloat16:
      return to_float(static_cast<const __half*>(attend.q.data)[offset]);
    case core::ElementType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(attend.q.data)[offset]);
    default:
      return static_cast<const float*>(attend.q.data)[offset];
  }
}

// Grid: blocks of query heads x num_kv_heads x max_chunks x num_rows, the first the fastest, along x.
template <typename Products>
__device__ __forceinline__ void attend_chunk(const core::AttendPagesBatchParams& params,
                                             const CopyUnits units) {
  using T = typename Products::T;
  constexpr int kHeads = Products::kHeads;
  TINYSERVE_DYNAMIC_SHARED(shared);
  wait_for_previous_kernel();
  let_next_kernel_begin();
  const core::AttendPagesParams& attend = params.attend;
  const AttendWork work = find_work(params, kHeads);
  const int head_dim = Products::kHeadDim == 0 ? static_cast<int>(attend.head_dim) : Products::kHeadDim;
  if (work.num_pages == 0) {
    if (work.num_chunks == 0 && work.chunk == 0 && work.first_query_head == 0) {
      join_chunks(attend, work.row_head, 0, head_dim, shared);
    }
    return;
  }
  const AttendLayout<Products> layout{head_dim, static_cast<int>(blockDim.x) / kWarpSize};
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  unsigned char* mine = shared + layout.warps() + warp * layout.warp_bytes();
  auto* queries = reinterpret_cast<typename Products::Query*>(shared + layout.queries());
  auto* scratch = reinterpret_cast<float*>(shared + layout.scratch(warp));

  TileRing<T> ring(params, work, units, layout.stage(), layout.num_warps, mine,
                   reinterpret_cast<int64_t*>(mine + layout.rows()));
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * head_dim; i += static_cast<int>(blockDim.x)) {
    const int h = i / head_dim;
    const int d = i % head_dim;
    queries[h * layout.query_pitch() + d] =
        Products::shared_query(load_query(attend, work, h, d), attend.sm_scale);
  }
  __syncthreads();

  Products products(queries, head_dim, attend.sm_scale, scratch);
  // Only logits of tensor cores go to scratch, and only for page_lse.
  if (Products::kQueriesInRegisters && attend.page_lse != nullptr) __syncthreads();
  PageLse page_lse;
#pragma unroll 1
  for (; !ring.done(); ring.advance()) {
    const LoadedTile<T> tile = ring.wait();
    const typename Products::Logits logits = products.logits(tile);
    if (attend.page_lse != nullptr) {
      products.store_logits(logits);
      __syncwarp();
      write_page_lse<kHeads>(attend, work, ring.steps, ring.computed, scratch, page_lse);
      __syncwarp();
    }
    products.add(tile, logits);
  }
  ring.drain();

  const int num_states = layout.num_warps * kHeads;
  auto* maxima = reinterpret_cast<float*>(shared + layout.states());
  const WarpStates states{.num_warps = layout.num_warps,
                          .maxima = maxima,
                          .sums = maxima + num_states,
                          .weights = maxima + 2 * num_states,
                          .accs = shared + layout.warps(),
                          .acc_stride = layout.warp_bytes()};
  static_assert(kHeads * sizeof(float) <= kAttendStages * 2 * kAttendTileTokens * sizeof(T),
                "A warp's ring holds its sums.");
  products.store(reinterpret_cast<float*>(mine), states.maxima + warp * kHeads, states.sums + warp * kHeads);
  __syncthreads();
  join_warps<kHeads>(attend, work, head_dim, states);

  const unsigned head_blocks = (static_cast<unsigned>(attend.group_size) + kHeads - 1) / kHeads;
  if (!is_last(attend, work.row_head, static_cast<unsigned>(work.num_chunks) * head_blocks, shared)) return;
  join_chunks(attend, work.row_head, work.num_chunks, head_dim, shared);
}

// Two kernels, for the budgets of registers that they have.
template <typename Products>
__global__ void __launch_bounds__(kAttendWarps* kWarpSize, Products::kMinBlocks)
    attend_pages_kernel(const __grid_constant__ core::AttendPagesBatchParams params, const CopyUnits units) {
  attend_chunk<Products>(params, units);
}
template <typename Products>
__global__ void __launch_bounds__(kAttendWarps* kWarpSize, Products::kMinBlocks)
    attend_pages_tensor_kernel(const __grid_constant__ core::AttendPagesBatchParams params,
                               const CopyUnits units) {
  attend_chunk<Products>(params, units);
}

}  // namespace tinyserve::cuda
