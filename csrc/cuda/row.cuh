// The query row of a packed token, found on the device.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/row.h"
#include "cuda/arch.cuh"
#include "cuda/batch.cuh"

namespace tinyserve::cuda {

// What a packed token sees as a query; padding and a token of negative position see nothing. At most
// batch.max_pages pages, because nobody has compared the lengths with the table. All lanes of a warp ask
// together for the same token.
__device__ __forceinline__ core::Row row_of(const core::BatchView& batch, int64_t token, int64_t page_size,
                                            int64_t window) {
  token += batch.first_row;
  // In a step of decoding token i mostly belongs to sequence i: then no load waits for another.
  int64_t sequence = token;
  if (token >= batch.batch_size || batch.cu_query_lens[token] != token ||
      batch.cu_query_lens[token + 1] != token + 1) {
    sequence = sequence_of(batch, token);
  }
  if (sequence < 0) return {};
  const int64_t position = int64_t{batch.seq_lens[sequence]} + token - batch.cu_query_lens[sequence];
  core::Row row = core::make_row(
      batch.page_table == nullptr ? nullptr : batch.page_table + sequence * batch.page_table_stride,
      static_cast<int32_t>(sequence), position, window);
  const int64_t end = batch.max_pages * page_size;
  if (row.num_tokens > end) row.num_tokens = end;
  if (row.first_token > row.num_tokens) row.first_token = row.num_tokens;
  return row;
}

}  // namespace tinyserve::cuda
