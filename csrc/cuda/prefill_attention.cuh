// Causal attention of new tokens over the stored ones (from the pages) and over themselves (as they were
// given). A block takes queries of one kv head, neighbouring tokens with all heads of the group; its warps
// carry a few of them each through tiles of keys that all share in shared memory, in fp32, with a running
// softmax. A lane has a key where logits are made and channels where values are added. The host knows no
// lengths: a block finds the sequences of its tokens, and takes one after the other.
//
// Built to be right and plain: products are fp32 on CUDA cores, and nothing is copied ahead.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/params.h"
#include "core/row.h"
#include "cuda/arch.cuh"
#include "cuda/batch.cuh"
#include "cuda/element.cuh"
#include "cuda/warp_row.cuh"

namespace tinyserve::cuda {

inline constexpr int kPrefillMaxWarps = 8;
inline constexpr int kPrefillWarpQueries = 4;
inline constexpr int kPrefillKeys = kWarpSize;  // of a tile

// Shared memory of a block, in floats. A row of keys is one longer than head_dim, so that lanes meet other
// banks.
struct PrefillLayout {
  int head_dim;
  int num_warps;

  constexpr int num_queries() const { return num_warps * kPrefillWarpQueries; }
  constexpr int key_pitch() const { return head_dim + 1; }
  constexpr int values() const { return kPrefillKeys * key_pitch(); }
  constexpr int queries() const { return values() + kPrefillKeys * head_dim; }
  constexpr int numerators() const { return queries() + num_queries() * head_dim; }  // [queries][keys]
  constexpr int floats() const { return numerators() + num_queries() * kPrefillKeys; }
};

// The new tokens of one sequence that a block has, and the tokens that they see.
struct PrefillRun {
  const int32_t* page_table;
  int64_t first_row;  // packed
  int64_t end_row;
  int64_t first_new;  // packed token of position 0, were it new
  int64_t stored;     // positions below come from the pages
  int64_t first_token;
  int64_t end_token;

  __device__ __forceinline__ bool has(int64_t row) const { return first_row <= row && row < end_row; }
};

__device__ __forceinline__ PrefillRun run_of_sequence(const core::PrefillAttentionBatchParams& params,
                                                      int64_t sequence, int64_t first_row, int64_t end_row) {
  const core::BatchView& batch = params.batch;
  const int64_t begin = batch.cu_query_lens[sequence];
  const int64_t end = batch.cu_query_lens[sequence + 1];
  const int64_t seq_len = batch.seq_lens[sequence];
  PrefillRun run = {.page_table = batch.page_table + sequence * batch.page_table_stride,
                    .first_row = first_row > begin ? first_row : begin,
                    .end_row = end_row < end ? end_row : end,
                    .first_new = begin - seq_len,
                    .stored = seq_len > 0 ? seq_len : 0,
                    .first_token = 0,
                    .end_token = 0};
  if (run.first_row < run.first_new) run.first_row = run.first_new;  // padding in front
  if (run.first_row >= run.end_row) return run;
  const core::Row first = core::make_row(nullptr, 0, run.first_row - run.first_new, params.attention.window);
  run.first_token = first.first_token;
  run.end_token = run.end_row - run.first_new;
  return run;
}

// The id of the page that holds a stored token; -1 where the table names none.
__device__ __forceinline__ int32_t page_of(const core::PrefillAttentionBatchParams& params,
                                           const PrefillRun& run, int64_t token) {
  const int64_t page = token / params.attention.page_size;
  return page < params.batch.max_pages ? run.page_table[page] : -1;
}

template <typename T>
__device__ __forceinline__ WarpRow load_slot(const core::PagePoolView& pool, int64_t page_id, int64_t head,
                                             int64_t slot, int64_t head_dim) {
  const T* from = pool.page<T>(page_id, head) + slot * pool.token_stride;
  WarpRow out = {};
  if constexpr (std::is_same_v<T, int8_t>) {
    const float scale = pool.token_scales(page_id, head)[slot];
    for_each_channel(head_dim, [&](int i, int d) {
      out.x[i] = scale * static_cast<float>(from[d * pool.channel_stride]);
    });
  } else {
    for_each_channel(head_dim, [&](int i, int d) { out.x[i] = to_float(from[d * pool.channel_stride]); });
  }
  return out;
}

// Keys and values of kPrefillKeys tokens into shared memory, one row a warp; zeros where there is no token.
template <typename T>
__device__ __forceinline__ void load_keys_and_values(const core::PrefillAttentionBatchParams& params,
                                                     const PrefillRun& run, int64_t first_token,
                                                     const PrefillLayout& layout, float* shared) {
  const core::PrefillAttentionParams& attention = params.attention;
  const int64_t head = blockIdx.y;
  for (int t = static_cast<int>(threadIdx.x / kWarpSize); t < kPrefillKeys; t += layout.num_warps) {
    const int64_t token = first_token + t;
    WarpRow k = {};
    WarpRow v = {};
    if (token < run.stored) {
      const int32_t page_id = page_of(params, run, token);
      const int64_t slot = token % attention.page_size;
      if (page_id >= 0) {
        k = load_slot<T>(attention.k_pages, page_id, head, slot, layout.head_dim);
        v = load_slot<T>(attention.v_pages, page_id, head, slot, layout.head_dim);
      }
    } else if (token < run.end_token) {
      k = load_row(attention.k, run.first_new + token, head, layout.head_dim);
      v = load_row(attention.v, run.first_new + token, head, layout.head_dim);
    }
    float* to_k = shared + t * layout.key_pitch();
    float* to_v = shared + layout.values() + t * layout.head_dim;
    for_each_channel(layout.head_dim, [&](int i, int d) {
      to_k[d] = k.x[i];
      to_v[d] = v.x[i];
    });
  }
}

__device__ __forceinline__ void store_prefill_output(const core::PrefillAttentionParams& attention,
                                                     int64_t index, float x) {
  switch (attention.q.type) {
    case core::ElementType::kFloat16:
      return from_float(x, static_cast<__half*>(attention.out)[index]);
    case core::ElementType::kBFloat16:
      return from_float(x, static_cast<__nv_bfloat16*>(attention.out)[index]);
    default:
      return from_float(x, static_cast<float*>(attention.out)[index]);
  }
}

// T: element type of the pages. Grid: blocks of queries (num_rows x group_size of them) x kv heads.
template <typename T>
__global__ void __launch_bounds__(kPrefillMaxWarps* kWarpSize)
    prefill_attention_kernel(const __grid_constant__ core::PrefillAttentionBatchParams params) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  float* shared = reinterpret_cast<float*>(memory);
  const core::PrefillAttentionParams& attention = params.attention;
  const PrefillLayout layout{static_cast<int>(attention.head_dim), static_cast<int>(blockDim.x / kWarpSize)};
  const int head_dim = layout.head_dim;
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const int first_query = static_cast<int>(threadIdx.x / kWarpSize) * kPrefillWarpQueries;  // of the warp
  const int64_t first_head = blockIdx.y * attention.group_size;
  const int64_t first_item = int64_t{blockIdx.x} * layout.num_queries();
  float* queries = shared + layout.queries() + first_query * head_dim;
  float* numerators = shared + layout.numerators() + first_query * kPrefillKeys;
  wait_for_previous_kernel();
  let_next_kernel_begin();

  int64_t rows[kPrefillWarpQueries];
  float max[kPrefillWarpQueries];
  float sum[kPrefillWarpQueries];  // of the lane's keys
  WarpRow acc[kPrefillWarpQueries];
#pragma unroll
  for (int j = 0; j < kPrefillWarpQueries; ++j) {
    const int64_t item = first_item + first_query + j;
    rows[j] = item / attention.group_size;
    max[j] = -INFINITY;
    sum[j] = 0.0F;
    acc[j] = {};
    if (rows[j] >= params.num_rows) continue;
    const WarpRow q =
        load_row(attention.q, rows[j], first_head + item % attention.group_size, attention.head_dim);
    for_each_channel(head_dim,
                     [&](int i, int d) { queries[j * head_dim + d] = q.x[i] * attention.sm_scale; });
  }
  __syncwarp();

  // Tokens behind the last sequence see nothing.
  const int64_t first_row = first_item / attention.group_size;
  int64_t end_row = (first_item + layout.num_queries() - 1) / attention.group_size + 1;
  const int64_t num_tokens = params.batch.cu_query_lens[params.batch.batch_size];
  if (end_row > params.num_rows) end_row = params.num_rows;
  if (end_row > num_tokens) end_row = num_tokens;
  int64_t sequence = 0;
  int64_t last_sequence = -1;
  if (first_row < end_row) {
    sequence = sequence_of(params.batch, first_row);
    last_sequence = sequence_of(params.batch, end_row - 1);
  }
  for (; sequence <= last_sequence; ++sequence) {
    const PrefillRun run = run_of_sequence(params, sequence, first_row, end_row);
    for (int64_t tile = run.first_token; tile < run.end_token; tile += kPrefillKeys) {
      __syncthreads();  // the tile before is not read any more
      load_keys_and_values<T>(params, run, tile, layout, shared);
      __syncthreads();
      const int64_t token = tile + lane;
      const bool there = token >= run.stored || page_of(params, run, token) >= 0;
      unsigned seen[kPrefillWarpQueries];
#pragma unroll
      for (int j = 0; j < kPrefillWarpQueries; ++j) {
        const core::Row row = core::make_row(nullptr, 0, rows[j] - run.first_new, attention.window);
        const bool sees = run.has(rows[j]) && there && row.first_token <= token && token < row.num_tokens;
        seen[j] = __ballot_sync(kFullWarp, sees);
        if (seen[j] == 0) continue;
        const float* key = shared + lane * layout.key_pitch();
        float logit = 0.0F;
        for (int d = 0; d < head_dim; ++d) logit = fmaf(key[d], queries[j * head_dim + d], logit);
        float new_max = sees ? logit : -INFINITY;
#pragma unroll
        for (int step = 1; step < kWarpSize; step *= 2) {
          new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, step));  // NaN loses
        }
        new_max = fmaxf(new_max, max[j]);
        const float shift = new_max == -INFINITY ? 0.0F : new_max;
        const float factor = expf(max[j] - shift);
        const float numerator = sees ? expf(logit - shift) : 0.0F;
        max[j] = new_max;
        sum[j] = fmaf(sum[j], factor, numerator);
        numerators[j * kPrefillKeys + lane] = numerator;
#pragma unroll
        for (float& x : acc[j].x) x *= factor;
      }
      __syncwarp();
      for (int t = 0; t < kPrefillKeys; ++t) {
        const float* value = shared + layout.values() + t * head_dim;
#pragma unroll
        for (int j = 0; j < kPrefillWarpQueries; ++j) {
          // A value that is not seen may be anything, and 0 times it not 0.
          if ((seen[j] >> t & 1U) == 0) continue;
          const float numerator = numerators[j * kPrefillKeys + t];
          for_each_channel(head_dim,
                           [&](int i, int d) { acc[j].x[i] = fmaf(numerator, value[d], acc[j].x[i]); });
        }
      }
    }
  }

#pragma unroll
  for (int j = 0; j < kPrefillWarpQueries; ++j) {
    if (rows[j] >= params.num_rows) continue;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) sum[j] += __shfl_xor_sync(kFullWarp, sum[j], step);
    const float inverse = sum[j] == 0.0F ? 0.0F : 1.0F / sum[j];
    const int64_t group = (first_item + first_query + j) % attention.group_size;
    const int64_t index = rows[j] * params.attention.num_kv_heads * attention.group_size + first_head + group;
    for_each_channel(head_dim, [&](int i, int d) {
      store_prefill_output(attention, index * head_dim + d, acc[j].x[i] * inverse);
    });
    if (lane == 0) {
      const float shift = max[j] == -INFINITY ? 0.0F : max[j];
      attention.lse[index] = sum[j] == 0.0F ? -INFINITY : shift + logf(sum[j]);
    }
  }
}

}  // namespace tinyserve::cuda
