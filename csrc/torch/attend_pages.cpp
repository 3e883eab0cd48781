// attend_pages and sparse_decode: checks and the stages they run.

#include <algorithm>
#include <limits>

#include <torch/csrc/stable/library.h>

#include "core/scratch.h"
#include "torch/decode_stages.h"

namespace tinyserve {
namespace {

// What both ops need of q and the pools; results allocated.
struct Attention {
  core::AttendPagesParams params;
  Tensor keep_q;
  Tensor out;
  Tensor lse;
};

Attention check_attention(const Tensor& q, const KvPools& pools, double sm_scale, double softcap) {
  check_softcap(softcap);
  Tensor keep_q;
  const core::PackedView view = check_packed(q, "q", keep_q);
  check_size(q, "q", 2, pools.head_dim, "head_dim of k_pages");
  const int64_t group_size = check_group_size(q.size(1), pools.num_kv_heads);
  Tensor out = empty_cpu({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  Tensor lse = empty_cpu({q.size(0), q.size(1)}, ScalarType::Float);
  const core::AttendPagesParams params{.q = view,
                                       .rows = nullptr,
                                       .num_kv_heads = pools.num_kv_heads,
                                       .group_size = group_size,
                                       .head_dim = pools.head_dim,
                                       .page_size = pools.page_size,
                                       .k_pages = pools.k,
                                       .v_pages = pools.v,
                                       .selected_pages = nullptr,
                                       .num_selected = nullptr,
                                       .list_width = 0,
                                       .max_chunks = 0,
                                       .sm_scale = static_cast<float>(sm_scale),
                                       .partials = nullptr,
                                       .chunks_done = nullptr,
                                       .page_lse = nullptr,
                                       .out = out.mutable_data_ptr(),
                                       .lse = static_cast<float*>(lse.mutable_data_ptr())};
  return {params, keep_q, out, lse};
}

// A user's page lists: ascending logical pages up to the row's last, with valid ids. A page that the window
// hides is allowed; it adds nothing.
void check_lists(const Batch& batch, const int32_t* selected, const int32_t* counts, int64_t width,
                 const KvPools& pools) {
  for (size_t r = 0; r < batch.rows.size(); ++r) {
    const core::Row& row = batch.rows[r];
    const int64_t end = row.end_page(pools.page_size);
    for (int64_t head = 0; head < pools.num_kv_heads; ++head) {
      const int64_t row_head = static_cast<int64_t>(r) * pools.num_kv_heads + head;
      TINYSERVE_CHECK(counts[row_head] >= 0 && counts[row_head] <= width, "num_selected: expected 0 to ",
                      width, ", got ", counts[row_head], " for token ", r, ", kv head ", head);
      int64_t previous = -1;
      for (int64_t i = 0; i < counts[row_head]; ++i) {
        const int32_t page = selected[row_head * width + i];
        TINYSERVE_CHECK(page > previous && page < end, "selected_pages: expected ascending pages from 0 to ",
                        end - 1, ", got ", page, " for token ", r, ", kv head ", head);
        check_table_entries(row.page_table, row.sequence, page, page + 1, pools.num_pages);
        previous = page;
      }
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> attend_pages(Tensor q, Tensor cu_query_lens, Tensor seq_lens,
                                                Tensor page_table, Tensor k_pages, Tensor v_pages,
                                                std::optional<Tensor> k_scales,
                                                std::optional<Tensor> v_scales,
                                                std::optional<Tensor> selected_pages,
                                                std::optional<Tensor> num_selected, double sm_scale,
                                                int64_t window, double softcap, bool return_page_lse) {
  const KvPools pools = check_pools(k_pages, v_pages, k_scales, v_scales);
  Attention attention = check_attention(q, pools, sm_scale, softcap);
  // With page lists only the listed pages are read, and check_lists looks at those.
  const Batch batch = check_batch(cu_query_lens, seq_lens, &page_table, 0, q.size(0), pools.page_size, window,
                                  selected_pages.has_value() ? -1 : pools.num_pages);
  core::AttendPagesParams& params = attention.params;
  int64_t max_list_pages = batch.max_visible_pages;
  params.list_width = batch.max_pages;
  TINYSERVE_CHECK(selected_pages.has_value() == num_selected.has_value(),
                  "num_selected: expected a tensor exactly where selected_pages is one, got one of the two");
  Tensor lists, counts;
  if (selected_pages.has_value()) {
    check_int32(*selected_pages, "selected_pages", 3, "[num_tokens, num_kv_heads, max_page_budget]");
    check_int32(*num_selected, "num_selected", 2, "[num_tokens, num_kv_heads]");
    for (int64_t axis = 0; axis < 2; ++axis) {
      const int64_t expected = axis == 0 ? q.size(0) : pools.num_kv_heads;
      check_size(*selected_pages, "selected_pages", axis, expected,
                 axis == 0 ? "num_tokens" : "num_kv_heads");
      check_size(*num_selected, "num_selected", axis, expected, axis == 0 ? "num_tokens" : "num_kv_heads");
    }
    lists = selected_pages->is_contiguous() ? *selected_pages : torch::stable::contiguous(*selected_pages);
    counts = num_selected->is_contiguous() ? *num_selected : torch::stable::contiguous(*num_selected);
    params.selected_pages = static_cast<const int32_t*>(lists.const_data_ptr());
    params.num_selected = static_cast<const int32_t*>(counts.const_data_ptr());
    params.list_width = max_list_pages = lists.size(2);
    check_lists(batch, params.selected_pages, params.num_selected, params.list_width, pools);
  }
  Tensor page_lse = return_page_lse ? empty_cpu({q.size(0), q.size(1), params.list_width}, ScalarType::Float)
                                    : empty_cpu({0}, ScalarType::Float);
  if (return_page_lse) {
    params.page_lse = static_cast<float*>(page_lse.mutable_data_ptr());
    std::fill_n(params.page_lse, page_lse.numel(), -std::numeric_limits<float>::infinity());
  }
  run_attend_pages(params, batch, max_list_pages);
  return {attention.out, attention.lse, page_lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_decode(
    Tensor q, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor k_pages, Tensor v_pages,
    std::optional<Tensor> k_scales, std::optional<Tensor> v_scales, Tensor page_summary, Tensor page_budget,
    int64_t max_page_budget, std::string scorer, std::string group_reduction, double sm_scale,
    int64_t num_sink_pages, int64_t num_recent_pages, int64_t window, double softcap) {
  const KvPools pools = check_pools(k_pages, v_pages, k_scales, v_scales);
  Attention attention = check_attention(q, pools, sm_scale, softcap);
  Tensor keep_q;
  core::ScorePagesParams scoring = check_score_pages(q, keep_q, pools.num_kv_heads, pools.page_size,
                                                     check_scorer_for(scorer, pools.k.type), group_reduction,
                                                     sm_scale, page_summary, pools.num_pages);
  const Batch batch = check_batch(cu_query_lens, seq_lens, &page_table, 0, q.size(0), pools.page_size, window,
                                  pools.num_pages);
  const int32_t* budgets =
      check_page_budget(page_budget, batch, max_page_budget, num_sink_pages, num_recent_pages);
  const int64_t num_rows = q.size(0);
  Tensor selected_pages = empty_cpu({num_rows, pools.num_kv_heads, max_page_budget}, ScalarType::Int);
  Tensor num_selected = empty_cpu({num_rows, pools.num_kv_heads}, ScalarType::Int);

  // Scores are indexed by logical page, so a row takes as many as its last visible page.
  int64_t row_stride = 0;
  for (const core::Row& row : batch.rows) row_stride = std::max(row_stride, row.end_page(pools.page_size));
  scoring.page_scores =
      core::Scratch::reserve(static_cast<size_t>(num_rows * pools.num_kv_heads * row_stride));
  scoring.row_stride = row_stride;
  run_score_pages(scoring, batch);
  const core::SelectPagesParams selection{
      .page_scores = scoring.page_scores,
      .row_stride = row_stride,
      .rows = batch.rows.data(),
      .page_budget = budgets,
      .num_kv_heads = pools.num_kv_heads,
      .page_size = pools.page_size,
      .num_sink_pages = num_sink_pages,
      .num_recent_pages = num_recent_pages,
      .max_page_budget = max_page_budget,
      .selected_pages = static_cast<int32_t*>(selected_pages.mutable_data_ptr()),
      .num_selected = static_cast<int32_t*>(num_selected.mutable_data_ptr())};
  run_select_pages(selection, batch);

  core::AttendPagesParams& params = attention.params;
  params.selected_pages = selection.selected_pages;
  params.num_selected = selection.num_selected;
  params.list_width = max_page_budget;
  run_attend_pages(params, batch, std::min(max_page_budget, batch.max_visible_pages));
  return {attention.out, attention.lse, selected_pages, num_selected};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tinyserve, CPU, m) {
  m.impl("attend_pages", TORCH_BOX(&attend_pages));
  m.impl("sparse_decode", TORCH_BOX(&sparse_decode));
}

}  // namespace tinyserve
