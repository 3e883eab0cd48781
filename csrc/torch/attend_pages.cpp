// attend_pages and sparse_decode: checks and the stages they run.

#include <algorithm>

#include "torch/decode_stages.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

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
  const std::optional<PageLists> lists = check_page_lists(selected_pages, num_selected, q.size(0), params);
  if (lists.has_value()) {
    max_list_pages = params.list_width;
    check_lists(batch, params.selected_pages, params.num_selected, params.list_width, pools);
  }
  Tensor page_lse = make_page_lse(return_page_lse, q, params);
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
  const core::ScorePagesParams scoring = check_score_pages(
      q, keep_q, pools.num_kv_heads, pools.page_size, check_scorer_for(scorer, pools.k.type), group_reduction,
      sm_scale, page_summary, pools.num_pages);
  const Batch batch = check_batch(cu_query_lens, seq_lens, &page_table, 0, q.size(0), pools.page_size, window,
                                  pools.num_pages);
  const int32_t* budgets =
      check_page_budgets(page_budget, batch, max_page_budget, num_sink_pages, num_recent_pages);
  const int64_t num_rows = q.size(0);
  const Selection selected = empty_selection(q, num_rows, pools.num_kv_heads, max_page_budget);

  const core::SelectPagesParams selection{.page_scores = nullptr,
                                          .row_stride = 0,
                                          .rows = nullptr,
                                          .page_budget = budgets,
                                          .num_kv_heads = pools.num_kv_heads,
                                          .page_size = pools.page_size,
                                          .num_sink_pages = num_sink_pages,
                                          .num_recent_pages = num_recent_pages,
                                          .max_page_budget = max_page_budget,
                                          .selected_pages = selected.page_data(),
                                          .num_selected = selected.count_data()};
  run_score_and_select(scoring, selection, batch);

  core::AttendPagesParams& params = attention.params;
  params.selected_pages = selection.selected_pages;
  params.num_selected = selection.num_selected;
  params.list_width = max_page_budget;
  run_attend_pages(params, batch, std::min(max_page_budget, batch.max_visible_pages));
  return {attention.out, attention.lse, selected.pages, selected.counts};
}

}  // namespace

TINYSERVE_CPU_OPS(m) {
  m.impl("attend_pages", TORCH_BOX(&attend_pages));
  m.impl("sparse_decode", TORCH_BOX(&sparse_decode));
}

}  // namespace tinyserve
