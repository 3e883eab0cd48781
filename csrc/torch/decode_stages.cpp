#include "torch/decode_stages.h"

#include <algorithm>

#include "core/limits.h"
#include "core/scratch.h"
#include "torch/run.h"

namespace tinyserve {
namespace {

// Scratch for one block of rows stays below this, however many rows an op is given.
constexpr int64_t kMaxScratchFloats = 4 << 20;

// Pages that make it worth waking another thread: a few microseconds of work.
constexpr int64_t kScoredPagesPerThread = 256;
constexpr int64_t kAttendedPagesPerThread = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Work items a thread takes at least, when each covers up to `pages_per_item` pages.
constexpr int64_t grain_of(int64_t pages_per_thread, int64_t pages_per_item) {
  return std::max<int64_t>(1, pages_per_thread / std::max<int64_t>(1, pages_per_item));
}

// Rows whose scratch of `floats_per_row` each is held at once.
int64_t rows_per_block(int64_t floats_per_row, int64_t num_rows) {
  return std::clamp<int64_t>(kMaxScratchFloats / std::max<int64_t>(floats_per_row, 1), 1,
                             std::max<int64_t>(num_rows, 1));
}

int64_t num_heads(const core::ScorePagesParams& params) { return params.num_kv_heads * params.group_size; }

// Floats of head_scores a row takes.
int64_t head_scores_per_row(const core::ScorePagesParams& params) {
  return params.group_reduction == core::GroupReduction::kSoftmax ? num_heads(params) * params.row_stride : 0;
}

// The first region of scoring; `params` are those of the block of rows from `first_row` on, but for q and
// rows.
void score_block(core::ScorePagesParams& params, const Batch& batch, int64_t first_row, int64_t num_rows) {
  params.rows = batch.rows.data() + first_row;
  params.q.data = static_cast<const char*>(params.q.data) +
                  first_row * params.q.token_stride * core::element_size(params.q.type);
  params.max_chunks = ceil_div(batch.max_visible_pages, core::kScoreChunkPages);
  run(cpu::kernels().score_pages, params, num_rows * params.num_kv_heads * params.max_chunks,
      grain_of(kScoredPagesPerThread, batch.max_visible_pages));
}

}  // namespace

void run_score_pages(core::ScorePagesParams params, const Batch& batch) {
  const core::ScorePagesParams all = params;
  const int64_t num_rows = static_cast<int64_t>(batch.rows.size());
  const int64_t floats_per_row = head_scores_per_row(params);
  const int64_t block = rows_per_block(floats_per_row, num_rows);
  const int64_t grain = grain_of(kScoredPagesPerThread, batch.max_visible_pages);
  if (floats_per_row > 0) {
    params.head_scores = core::Scratch::reserve(static_cast<size_t>(block * floats_per_row));
  }
  for (int64_t first = 0; first < num_rows; first += block) {
    const int64_t rows = std::min(block, num_rows - first);
    params.q = all.q;
    params.page_scores = all.page_scores + first * params.num_kv_heads * params.row_stride;
    score_block(params, batch, first, rows);
    if (floats_per_row > 0) run(cpu::kernels().join_scores, params, rows * params.num_kv_heads, grain);
  }
}

void run_select_pages(const core::SelectPagesParams& params, const Batch& batch) {
  run(cpu::kernels().select_pages, params, static_cast<int64_t>(batch.rows.size()) * params.num_kv_heads,
      grain_of(kScoredPagesPerThread, batch.max_visible_pages));
}

void run_score_and_select(core::ScorePagesParams scoring, core::SelectPagesParams selection,
                          const Batch& batch) {
  const core::ScorePagesParams all_scoring = scoring;
  const core::SelectPagesParams all_selection = selection;
  const int64_t num_rows = static_cast<int64_t>(batch.rows.size());
  const int64_t num_kv_heads = scoring.num_kv_heads;
  // Scores are indexed by logical page, so a row takes as many as its last visible page.
  int64_t row_stride = 0;
  for (const core::Row& row : batch.rows) {
    row_stride = std::max(row_stride, row.end_page(scoring.page_size));
  }
  scoring.row_stride = selection.row_stride = row_stride;
  const int64_t page_scores_per_row = num_kv_heads * row_stride;
  const int64_t floats_per_row = page_scores_per_row + head_scores_per_row(scoring);
  const int64_t block = rows_per_block(floats_per_row, num_rows);
  scoring.page_scores = core::Scratch::reserve(static_cast<size_t>(block * floats_per_row));
  scoring.head_scores = scoring.page_scores + block * page_scores_per_row;
  selection.page_scores = scoring.page_scores;
  for (int64_t first = 0; first < num_rows; first += block) {
    const int64_t rows = std::min(block, num_rows - first);
    scoring.q = all_scoring.q;
    score_block(scoring, batch, first, rows);
    selection.rows = scoring.rows;
    selection.selected_pages =
        all_selection.selected_pages + first * num_kv_heads * selection.max_page_budget;
    selection.num_selected = all_selection.num_selected + first * num_kv_heads;
    torch::stable::parallel_for(0, rows * num_kv_heads,
                                grain_of(kScoredPagesPerThread, batch.max_visible_pages),
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t item = begin; item < end; ++item) {
                                    cpu::kernels().join_scores(scoring, item, item + 1);
                                    cpu::kernels().select_pages(selection, item, item + 1);
                                  }
                                });
  }
}

void run_attend_pages(core::AttendPagesParams params, const Batch& batch, int64_t max_list_pages) {
  const int64_t num_rows = static_cast<int64_t>(batch.rows.size());
  const int64_t num_query_heads = params.num_kv_heads * params.group_size;
  params.max_chunks = std::max<int64_t>(1, ceil_div(max_list_pages, core::kChunkPages));
  const int64_t floats_per_row = num_query_heads * params.max_chunks * (params.head_dim + 2);
  const int64_t block = rows_per_block(floats_per_row, num_rows);
  const int64_t lists = block * params.num_kv_heads;
  params.partials = core::Scratch::reserve(static_cast<size_t>(block * floats_per_row + lists));
  params.chunks_done = reinterpret_cast<int32_t*>(params.partials + block * floats_per_row);

  const core::AttendPagesParams all = params;
  const int64_t element_size = core::element_size(all.q.type);
  for (int64_t first = 0; first < num_rows; first += block) {
    const int64_t rows = std::min(block, num_rows - first);
    params.rows = batch.rows.data() + first;
    params.q.data = static_cast<const char*>(all.q.data) + first * all.q.token_stride * element_size;
    params.out = static_cast<char*>(all.out) + first * num_query_heads * params.head_dim * element_size;
    params.lse = all.lse + first * num_query_heads;
    if (all.selected_pages != nullptr) {
      params.selected_pages = all.selected_pages + first * params.num_kv_heads * params.list_width;
      params.num_selected = all.num_selected + first * params.num_kv_heads;
    }
    if (all.page_lse != nullptr) params.page_lse = all.page_lse + first * num_query_heads * params.list_width;
    std::fill_n(params.chunks_done, lists, 0);
    run(cpu::kernels().attend_pages, params, rows * params.num_kv_heads * params.max_chunks,
        grain_of(kAttendedPagesPerThread, max_list_pages));
  }
}

}  // namespace tinyserve
