// The three stages of sparse decode on the CPU, shared by score_pages, select_pages, attend_pages and the
// fused sparse_decode: one code path, so the fused op equals the three bit for bit.
#pragma once

#include "core/params.h"
#include "torch/contents.h"

namespace tinyserve {

// Scores of every row into `page_scores` [num_rows, num_kv_heads, row_stride]; only visible pages are
// written. Reserves its own scratch.
void run_score_pages(core::ScorePagesParams params, const Batch& batch);

void run_select_pages(const core::SelectPagesParams& params, const Batch& batch);

// Both, without keeping the scores: one parallel region scores, a second one joins the scores of a row and kv
// head and selects its pages while they are in the cache. Reserves the scores' scratch and sets the two
// params' page_scores and row_stride.
void run_score_and_select(core::ScorePagesParams scoring, core::SelectPagesParams selection,
                          const Batch& batch);

// Attention over the page lists in `params`; allocates the partial results itself, in bounded blocks of rows.
void run_attend_pages(core::AttendPagesParams params, const Batch& batch, int64_t max_list_pages);

}  // namespace tinyserve
