#include "torch/cuda/decode_stages.h"

#include <algorithm>

#include "cuda/attend_chunks.h"
#include "cuda/attend_pages.h"
#include "cuda/score_pages.h"
#include "cuda/select_pages.h"
#include "torch/cuda/summary_rows.h"

// 256 MiB: the scratch of any step of decoding, and of a prompt's rows a part at a time. The tests build with
// less.
#ifndef TINYSERVE_MAX_SCRATCH_FLOATS
#define TINYSERVE_MAX_SCRATCH_FLOATS (1 << 26)
#endif

namespace tinyserve {
namespace {

constexpr int64_t kMaxScratchFloats = TINYSERVE_MAX_SCRATCH_FLOATS;

// Rows whose scratch of `floats_per_row` each is held at once.
int64_t rows_per_block(int64_t num_rows, int64_t floats_per_row) {
  return std::clamp<int64_t>(kMaxScratchFloats / std::max<int64_t>(floats_per_row, 1), 1,
                             std::max<int64_t>(num_rows, 1));
}

// Of a block of rows, from torch's allocator: given back with the object, which is in the order of the
// stream.
class Scratch {
 public:
  Scratch(const Tensor& beside, int64_t num_rows, int64_t floats_per_row)
      : memory_(empty_beside(beside, {rows_per_block(num_rows, floats_per_row) * floats_per_row},
                             ScalarType::Float)) {}
  float* data() const { return static_cast<float*>(memory_.mutable_data_ptr()); }

 private:
  Tensor memory_;
};

// Calls f(first row, number of rows) for blocks of rows whose scratch of `floats_per_row` each is bounded.
template <typename F>
void for_blocks_of_rows(int64_t num_rows, int64_t floats_per_row, const F& f) {
  const int64_t block = rows_per_block(num_rows, floats_per_row);
  for (int64_t first = 0; first < num_rows; first += block) f(first, std::min(block, num_rows - first));
}

core::BatchView from_row(core::BatchView batch, int64_t first) {
  batch.first_row = first;
  return batch;
}

core::PackedView from_row(core::PackedView q, int64_t first) {
  q.data = static_cast<const char*>(q.data) + first * q.token_stride * core::element_size(q.type);
  return q;
}

core::ScorePagesBatchParams block_of_scores(const core::ScorePagesParams& scoring, const DecodeRows& rows,
                                            int64_t first, int64_t num_rows) {
  return {.q = from_row(scoring.q, first),
          .batch = from_row(rows.batch, first),
          .num_rows = num_rows,
          .num_kv_heads = scoring.num_kv_heads,
          .group_size = scoring.group_size,
          .head_dim = scoring.head_dim,
          .page_size = scoring.page_size,
          .window = rows.window,
          .page_summary = scoring.page_summary,
          .scorer = scoring.scorer,
          .group_reduction = scoring.group_reduction,
          .sm_scale = scoring.sm_scale,
          .page_scores = nullptr,
          .head_scores = nullptr,
          .row_stride = rows.batch.max_pages};
}

// Floats of head_scores that a row takes.
int64_t head_scores_per_row(const core::ScorePagesParams& scoring, const DecodeRows& rows) {
  if (scoring.group_reduction != core::GroupReduction::kSoftmax) return 0;
  return scoring.num_kv_heads * scoring.group_size * rows.batch.max_pages;
}

}  // namespace

DecodeRows check_decode_rows(const Tensor& q, const Tensor& cu_query_lens, const Tensor& seq_lens,
                             const Tensor& page_table, int64_t page_size, int64_t window) {
  check_page_size(page_size);
  check_window(window);
  return {check_batch_view(cu_query_lens, seq_lens, &page_table, 0), q.size(0), window};
}

void launch_score_pages(const CurrentDevice& device, const Tensor& q, const core::ScorePagesParams& scoring,
                        const DecodeRows& rows, float* page_scores) {
  check_summary_rows(scoring.page_summary);
  const int64_t floats = head_scores_per_row(scoring, rows);
  const Scratch head_scores(q, rows.num_rows, floats);
  for_blocks_of_rows(rows.num_rows, floats, [&](int64_t first, int64_t num_rows) {
    core::ScorePagesBatchParams params = block_of_scores(scoring, rows, first, num_rows);
    params.page_scores = page_scores + first * params.num_kv_heads * params.row_stride;
    params.head_scores = head_scores.data();
    device.check_launched(cuda::score_pages(params, device.stream()), "score_pages");
  });
}

void launch_score_and_select(const CurrentDevice& device, const Tensor& q,
                             const core::ScorePagesParams& scoring, core::SelectPagesBatchParams selection,
                             const DecodeRows& rows) {
  check_summary_rows(scoring.page_summary);
  const int64_t page_scores_per_row = scoring.num_kv_heads * rows.batch.max_pages;
  const int64_t floats = page_scores_per_row + head_scores_per_row(scoring, rows);
  const Scratch scores(q, rows.num_rows, floats);
  const core::SelectPagesBatchParams all = selection;
  for_blocks_of_rows(rows.num_rows, floats, [&](int64_t first, int64_t num_rows) {
    core::ScorePagesBatchParams params = block_of_scores(scoring, rows, first, num_rows);
    params.page_scores = scores.data();
    params.head_scores = scores.data() + num_rows * page_scores_per_row;
    device.check_launched(cuda::score_pages(params, device.stream()), "score_pages");
    const int64_t first_head = first * all.num_kv_heads;
    selection.page_scores = params.page_scores;
    selection.row_stride = params.row_stride;
    selection.batch = params.batch;
    selection.num_rows = num_rows;
    selection.window = rows.window;
    selection.selected_pages = all.selected_pages + first_head * all.max_page_budget;
    selection.num_selected = all.num_selected + first_head;
    device.check_launched(cuda::select_pages(selection, device.stream()), "select_pages");
  });
}

void launch_attend_pages(const CurrentDevice& device, const Tensor& q, const core::AttendPagesParams& params,
                         const DecodeRows& rows, int64_t max_list_pages) {
  const int64_t num_heads = params.num_kv_heads * params.group_size;
  const int64_t max_chunks = cuda::max_chunks(max_list_pages, params.page_size);
  const int64_t floats = num_heads * max_chunks * (params.head_dim + 2);
  const int64_t num_counters = rows_per_block(rows.num_rows, floats) * params.num_kv_heads;
  const Scratch partials(q, rows.num_rows, floats);
  const Tensor counters = empty_beside(q, {num_counters}, ScalarType::Int);
  auto* chunks_done = static_cast<int32_t*>(counters.mutable_data_ptr());
  // Once: each launch leaves zeros.
  if (rows.num_rows > 0) device.fill_with_zeros(chunks_done, sizeof(int32_t) * num_counters);
  for_blocks_of_rows(rows.num_rows, floats, [&](int64_t first, int64_t num_rows) {
    core::AttendPagesBatchParams block{
        .attend = params, .batch = from_row(rows.batch, first), .num_rows = num_rows, .window = rows.window};
    core::AttendPagesParams& attend = block.attend;
    attend.q = from_row(params.q, first);
    attend.max_chunks = max_chunks;
    attend.partials = partials.data();
    attend.chunks_done = chunks_done;
    attend.out = static_cast<char*>(params.out) +
                 first * num_heads * params.head_dim * core::element_size(params.q.type);
    attend.lse = params.lse + first * num_heads;
    if (params.selected_pages != nullptr) {
      attend.selected_pages = params.selected_pages + first * params.num_kv_heads * params.list_width;
      attend.num_selected = params.num_selected + first * params.num_kv_heads;
    }
    if (params.page_lse != nullptr) attend.page_lse = params.page_lse + first * num_heads * params.list_width;
    device.check_launched(cuda::attend_pages(block, device.stream()), "attend_pages");
  });
}

}  // namespace tinyserve
