// Which sequence a packed token belongs to, and where it sits: read on the device, so that a captured graph
// may be replayed with other lengths.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"

namespace tinyserve::cuda {

// The sequence of a packed token; -1 for padding behind the last one. All lanes of a warp ask together for
// the same token: they look at 32 boundaries at a time, so 32 sequences cost one load and 1024 two.
__device__ __forceinline__ int64_t sequence_of(const core::BatchView& batch, int64_t token) {
  // Boundaries below `first` are <= token, those from `end` on are greater.
  int64_t first = 0;
  int64_t end = batch.batch_size + 1;
  while (first < end) {
    const int64_t step = (end - first + kWarpSize - 1) / kWarpSize;
    const int64_t probe = first + threadIdx.x % kWarpSize * step;
    const bool at_or_before = probe < end && batch.cu_query_lens[probe] <= token;
    const int64_t count = __popc(__ballot_sync(kFullWarp, at_or_before));
    if (first + count * step < end) end = first + count * step;
    if (count > 0) first += (count - 1) * step + 1;
  }
  return first <= batch.batch_size ? first - 1 : -1;
}

// New tokens of one sequence that fall into one page.
struct PageRun {
  int64_t page_id = -1;  // -1: nothing to do
  int64_t num_tokens = 0;
  int64_t first_slot = 0;
};

// The run that begins at a packed token. A token in the middle of a run has none, nor has padding or a token
// whose page the table does not name. All lanes of a warp ask together.
__device__ __forceinline__ PageRun run_from(const core::BatchView& batch, int64_t token, int64_t page_size) {
  const int64_t sequence = sequence_of(batch, token);
  if (sequence < 0) return {};
  const int64_t begin = batch.cu_query_lens[sequence];
  const int64_t position = batch.seq_lens[sequence] + token - begin;
  if (position < 0) return {};
  const int64_t slot = position % page_size;
  const int64_t page = position / page_size;
  if ((slot != 0 && token != begin) || page >= batch.max_pages) return {};
  const int64_t left = batch.cu_query_lens[sequence + 1] - token;
  const int64_t room = page_size - slot;
  return {.page_id = batch.page_table[sequence * batch.page_table_stride + page],
          .num_tokens = left < room ? left : room,
          .first_slot = slot};
}

}  // namespace tinyserve::cuda
