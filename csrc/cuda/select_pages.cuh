// Exact top-K pages, one block per row and kv head: a radix select over order-preserving 32-bit keys (11 + 11
// + 10 bits) finds the K-th best score, one pass in page order then emits the better pages and the
// lowest-numbered of those that tie with it. The keys stay in registers where a block's registers hold a
// row's pages, and are read again for each pass otherwise.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/row.h"
#include "cuda/arch.cuh"
#include "cuda/row.cuh"

namespace tinyserve::cuda {

inline constexpr unsigned kMinSelectThreads = 64;
inline constexpr unsigned kMaxSelectThreads = 1024;
inline constexpr int kSelectItems = 8;  // keys of a thread
inline constexpr int kSelectBins = 2048;

struct SelectShared {
  uint32_t histogram[kSelectBins];
  uint32_t warp_totals[kMaxSelectThreads / kWarpSize];
  uint32_t bin;   // of the K-th best
  uint32_t rank;  // of the K-th best within its bin, from 1
  uint32_t bin_size;
};

// Smaller key = better score; NaN is last, below -inf; -0.0 equals 0.0.
__device__ __forceinline__ uint32_t select_key(float score) {
  if (score != score) return 0xffffffffU;
  const uint32_t bits = __float_as_uint(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? bits : ~bits & 0x7fffffffU;
}

// The sum of the lower lanes' values.
__device__ __forceinline__ uint32_t sum_of_lower_lanes(uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  uint32_t sum = value;
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const uint32_t below = __shfl_up_sync(kFullWarp, sum, delta);
    if (lane >= delta) sum += below;
  }
  return sum - value;
}

// The sum of the values that the lower warps of the block have put into `totals`.
__device__ __forceinline__ uint32_t sum_of_lower_warps(const uint32_t* totals) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  return __reduce_add_sync(kFullWarp, lane < threadIdx.x / kWarpSize ? totals[lane] : 0U);
}

// Keys of a row's candidates, a tile at a time. A warp holds consecutive pages, item after item, so that
// reading is coalesced and ballots count in page order.
struct SelectTile {
  uint32_t keys[kSelectItems];
  int32_t first;  // the thread's page of item 0
  int32_t end;

  __device__ __forceinline__ int32_t page(int item) const { return first + item * kWarpSize; }
  __device__ __forceinline__ bool holds(int item) const { return page(item) < end; }

  __device__ __forceinline__ void load(const float* scores, int64_t begin, int64_t row_end) {
    const unsigned in_tile = threadIdx.x / kWarpSize * kSelectItems * kWarpSize + threadIdx.x % kWarpSize;
    first = static_cast<int32_t>(begin + in_tile);
    end = static_cast<int32_t>(row_end);
#pragma unroll
    for (int i = 0; i < kSelectItems; ++i) keys[i] = holds(i) ? select_key(scores[page(i)]) : 0;
  }
};

// Keys of which the masked bits are less than `prefix` are selected, and the first num_ties of those where
// they are equal to it.
struct SelectThreshold {
  uint32_t prefix = 0;
  uint32_t mask = 0;
  uint32_t num_ties = 0;
};

// Narrows the threshold by the bits [shift, shift + bits) of the keys. Leaves in shared memory how many keys
// tie with it.
__device__ __forceinline__ void find_digit(SelectShared& shared, int shift, int bits,
                                           SelectThreshold& threshold) {
  // Every thread looks at consecutive bins.
  const uint32_t per_thread = (1U << bits) / blockDim.x > 0 ? (1U << bits) / blockDim.x : 1;
  const uint32_t first_bin = threadIdx.x * per_thread;
  uint32_t own = 0;
  for (uint32_t i = 0; i < per_thread; ++i) own += shared.histogram[first_bin + i];
  const uint32_t below_in_warp = sum_of_lower_lanes(own);
  if (threadIdx.x % kWarpSize == kWarpSize - 1) {
    shared.warp_totals[threadIdx.x / kWarpSize] = below_in_warp + own;
  }
  __syncthreads();
  uint32_t below = sum_of_lower_warps(shared.warp_totals) + below_in_warp;
  if (below < threshold.num_ties && threshold.num_ties <= below + own) {
    uint32_t bin = first_bin;
    while (below + shared.histogram[bin] < threshold.num_ties) below += shared.histogram[bin++];
    shared.bin = bin;
    shared.rank = threshold.num_ties - below;
    shared.bin_size = shared.histogram[bin];
  }
  __syncthreads();
  threshold.prefix |= shared.bin << shift;
  threshold.mask |= ((1U << bits) - 1) << shift;
  threshold.num_ties = shared.rank;
}

// The threshold that selects the k best (k >= 1) of candidates [begin, end), of which `tile` holds the first.
__device__ __forceinline__ SelectThreshold find_threshold(SelectShared& shared, SelectTile& tile,
                                                          const float* scores, int64_t begin, int64_t end,
                                                          uint32_t k) {
  const int64_t tile_pages = int64_t{blockDim.x} * kSelectItems;
  SelectThreshold threshold{.num_ties = k};
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : (pass == 1 ? 10 : 0);
    const int bits = pass == 2 ? 10 : 11;
    const uint32_t digit_mask = (1U << bits) - 1;
    for (uint32_t bin = threadIdx.x; bin < kSelectBins; bin += blockDim.x) shared.histogram[bin] = 0;
    __syncthreads();
    for (int64_t at = begin; at < end; at += tile_pages) {
      if (end - begin > tile_pages) tile.load(scores, at, end);
#pragma unroll
      for (int i = 0; i < kSelectItems; ++i) {
        if (tile.holds(i) && (tile.keys[i] & threshold.mask) == threshold.prefix) {
          atomicAdd(&shared.histogram[tile.keys[i] >> shift & digit_mask], 1U);
        }
      }
    }
    __syncthreads();
    find_digit(shared, shift, bits, threshold);
    if (shared.rank == shared.bin_size) break;  // all that tie are selected: which are better is no question
  }
  return threshold;
}

// Writes the selected of candidates [begin, end) to `selected`, ascending.
__device__ __forceinline__ void emit_selected(SelectShared& shared, SelectTile& tile, const float* scores,
                                              int64_t begin, int64_t end, const SelectThreshold& threshold,
                                              int32_t* selected) {
  const int64_t tile_pages = int64_t{blockDim.x} * kSelectItems;
  const uint32_t lanes_below = (1U << threadIdx.x % kWarpSize) - 1;
  const uint32_t warp = threadIdx.x / kWarpSize;
  const uint32_t num_warps = blockDim.x / kWarpSize;
  // Better pages and ties, in the halves of one number: a tile has at most 8192 of both.
  constexpr uint32_t kTie = 1U << 16;
  uint32_t num_better = 0;  // in the tiles before
  uint32_t num_ties = 0;
  for (int64_t at = begin; at < end; at += tile_pages) {
    if (end - begin > tile_pages) tile.load(scores, at, end);
    uint32_t in_warp = 0;
#pragma unroll
    for (int i = 0; i < kSelectItems; ++i) {
      const uint32_t masked = tile.keys[i] & threshold.mask;
      in_warp += __popc(__ballot_sync(kFullWarp, tile.holds(i) && masked < threshold.prefix));
      in_warp += __popc(__ballot_sync(kFullWarp, tile.holds(i) && masked == threshold.prefix)) * kTie;
    }
    if (threadIdx.x % kWarpSize == 0) shared.warp_totals[warp] = in_warp;
    __syncthreads();
    const uint32_t in_lower_warps = sum_of_lower_warps(shared.warp_totals);
    uint32_t better = num_better + in_lower_warps % kTie;
    uint32_t ties = num_ties + in_lower_warps / kTie;
#pragma unroll
    for (int i = 0; i < kSelectItems; ++i) {
      const uint32_t masked = tile.keys[i] & threshold.mask;
      const bool is_better = tile.holds(i) && masked < threshold.prefix;
      const bool is_tie = tile.holds(i) && masked == threshold.prefix;
      const uint32_t all_better = __ballot_sync(kFullWarp, is_better);
      const uint32_t all_ties = __ballot_sync(kFullWarp, is_tie);
      const uint32_t ties_before = ties + __popc(all_ties & lanes_below);
      if (is_better || (is_tie && ties_before < threshold.num_ties)) {
        const uint32_t taken = ties_before < threshold.num_ties ? ties_before : threshold.num_ties;
        selected[better + __popc(all_better & lanes_below) + taken] = tile.page(i);
      }
      better += __popc(all_better);
      ties += __popc(all_ties);
    }
    if (end - begin <= tile_pages) return;
    const uint32_t lane = threadIdx.x % kWarpSize;
    const uint32_t in_tile = __reduce_add_sync(kFullWarp, lane < num_warps ? shared.warp_totals[lane] : 0U);
    num_better += in_tile % kTie;
    num_ties += in_tile / kTie;
    __syncthreads();  // the totals of the next tile take the same place
  }
}

// Grid: rows x kv heads; a power of two of threads.
__global__ void __launch_bounds__(kMaxSelectThreads)
    select_pages_kernel(const __grid_constant__ core::SelectPagesBatchParams params) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  SelectShared& shared = *reinterpret_cast<SelectShared*>(memory);
  wait_for_previous_kernel();
  let_next_kernel_begin();
  const core::Row row = row_of(params.batch, blockIdx.x, params.page_size, params.window);
  const int64_t item = int64_t{blockIdx.x} * params.num_kv_heads + blockIdx.y;
  const float* scores = params.page_scores + item * params.row_stride;
  int32_t* selected = params.selected_pages + item * params.max_page_budget;

  const int64_t first_page = row.first_page(params.page_size);
  const int64_t end_page = row.end_page(params.page_size);
  int64_t budget = row.num_tokens > 0 ? params.page_budget[row.sequence] : 0;
  if (budget > params.max_page_budget) budget = params.max_page_budget;
  if (budget > end_page - first_page) budget = end_page - first_page;

  // [first_page, sink_end) and [recent_begin, end_page) are forced, the rest are candidates.
  int64_t sink_end = params.num_sink_pages > first_page ? params.num_sink_pages : first_page;
  int64_t recent_begin = end_page - params.num_recent_pages;
  if (recent_begin < first_page) recent_begin = first_page;
  if (sink_end > recent_begin) sink_end = recent_begin;
  const int64_t num_sinks = sink_end - first_page;
  const int64_t num_candidates = recent_begin - sink_end;
  int64_t num_free = budget - num_sinks - (end_page - recent_begin);
  if (num_free < 0) num_free = 0;
  if (num_free > num_candidates) num_free = num_candidates;

  const int64_t num_selected = num_sinks + num_free + (end_page - recent_begin);
  if (threadIdx.x == 0) params.num_selected[item] = static_cast<int32_t>(num_selected);
  for (int64_t i = threadIdx.x; i < params.max_page_budget; i += blockDim.x) {
    if (i < num_sinks || (i < num_sinks + num_free && num_free == num_candidates)) {
      selected[i] = static_cast<int32_t>(first_page + i);
    } else if (i >= num_selected) {
      selected[i] = -1;
    } else if (i >= num_sinks + num_free) {
      selected[i] = static_cast<int32_t>(recent_begin + i - num_sinks - num_free);
    }
  }
  if (num_free == 0 || num_free == num_candidates) return;

  SelectTile tile;
  tile.load(scores, sink_end, recent_begin);
  const SelectThreshold threshold =
      find_threshold(shared, tile, scores, sink_end, recent_begin, static_cast<uint32_t>(num_free));
  emit_selected(shared, tile, scores, sink_end, recent_begin, threshold, selected + num_sinks);
}

}  // namespace tinyserve::cuda
