// The stages of sparse decode in CUDA, shared by score_pages, attend_pages and the fused sparse_decode: the
// same launches with the same parameters, so the fused op equals the three bit for bit.
//
// The host knows shapes and no lengths: grids and scratch are sized for the widest row that the page table or
// the lists allow, and blocks with nothing to do end at once. Scratch comes from torch's allocator, in the
// order of the stream, so that a CUDA graph may hold a call. Rows go in blocks where the scratch of all would
// be large.
#pragma once

#include "core/params.h"
#include "torch/cuda/device.h"
#include "torch/op_arguments.h"

namespace tinyserve {

// What the stages share: which rows there are and what they see.
struct DecodeRows {
  core::BatchView batch;
  int64_t num_rows;
  int64_t window;
};
DecodeRows check_decode_rows(const Tensor& q, const Tensor& cu_query_lens, const Tensor& seq_lens,
                             const Tensor& page_table, int64_t page_size, int64_t window);

// Scores of all rows into `page_scores` [num_rows, num_kv_heads, max_pages], every page of them.
void launch_score_pages(const CurrentDevice& device, const Tensor& q, const core::ScorePagesParams& scoring,
                        const DecodeRows& rows, float* page_scores);

// Attention over the lists in `params`, of at most `max_list_pages` pages each.
void launch_attend_pages(const CurrentDevice& device, const Tensor& q, const core::AttendPagesParams& params,
                         const DecodeRows& rows, int64_t max_list_pages);

// Scores and selections of all rows, without keeping the scores. Rows and scores in `selection` are set here.
void launch_score_and_select(const CurrentDevice& device, const Tensor& q,
                             const core::ScorePagesParams& scoring, core::SelectPagesBatchParams selection,
                             const DecodeRows& rows);

}  // namespace tinyserve
