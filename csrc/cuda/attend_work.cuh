// What a block of attend_pages does: one chunk of a row's page list, for one kv head and some of its query
// heads.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_chunks.h"
#include "cuda/row.cuh"

namespace tinyserve::cuda {

struct AttendWork {
  int64_t row_idx;
  int64_t row_head;  // row_idx * num_kv_heads + head
  int head;
  int first_query_head;  // of the group
  int chunk;
  int first_entry;  // of the row's list
  int num_pages;    // of the chunk; 0: nothing to do
  int num_chunks;
  const int32_t* list;  // null: the visible pages from first_page on
  int first_page;
  int first_token;
  int num_tokens;
  const int32_t* page_table;
};

__device__ __forceinline__ AttendWork find_work(const core::AttendPagesBatchParams& params, int heads) {
  const core::AttendPagesParams& attend = params.attend;
  const auto page_size = static_cast<unsigned>(attend.page_size);
  const auto num_kv_heads = static_cast<unsigned>(attend.num_kv_heads);
  const unsigned head_blocks = (static_cast<unsigned>(attend.group_size) + heads - 1) / heads;
  AttendWork work = {};
  // Blocks that read the same pages are neighbours, then those that read neighbouring memory.
  unsigned item = blockIdx.x;
  work.first_query_head = static_cast<int>(item % head_blocks * heads);
  item /= head_blocks;
  work.head = static_cast<int>(item % num_kv_heads);
  item /= num_kv_heads;
  work.chunk = static_cast<int>(item % static_cast<unsigned>(attend.max_chunks));
  work.row_idx = item / static_cast<unsigned>(attend.max_chunks);
  work.row_head = work.row_idx * num_kv_heads + work.head;

  const core::Row row = row_of(params.batch, work.row_idx, params.attend.page_size, params.window);
  work.page_table = row.page_table;
  work.first_token = static_cast<int>(row.first_token);
  work.num_tokens = static_cast<int>(row.num_tokens);
  work.first_page = static_cast<int>(static_cast<unsigned>(work.first_token) / page_size);
  if (work.num_tokens == 0) return work;
  int list_len;
  if (attend.selected_pages != nullptr) {
    work.list = attend.selected_pages + work.row_head * attend.list_width;
    // Nobody has looked at the lists; scratch is there for as many pages as they can hold.
    list_len = min(max(attend.num_selected[work.row_head], 0), static_cast<int>(attend.list_width));
  } else {
    list_len = static_cast<int>((static_cast<unsigned>(work.num_tokens) + page_size - 1) / page_size) -
               work.first_page;
  }
  const auto pages_of_chunk = static_cast<int>(chunk_pages(list_len, page_size));
  work.num_chunks = static_cast<int>(ceil_div(list_len, pages_of_chunk));
  work.first_entry = work.chunk * pages_of_chunk;
  work.num_pages = min(max(list_len - work.first_entry, 0), pages_of_chunk);
  return work;
}

}  // namespace tinyserve::cuda
