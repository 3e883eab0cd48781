// attend_pages and sparse_decode in CUDA: checks and the stages they launch.

#include <algorithm>

#include "torch/cuda/decode_stages.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor, Tensor> attend_pages(Tensor q, Tensor cu_query_lens, Tensor seq_lens,
                                                Tensor page_table, Tensor k_pages, Tensor v_pages,
                                                std::optional<Tensor> k_scales,
                                                std::optional<Tensor> v_scales,
                                                std::optional<Tensor> selected_pages,
                                                std::optional<Tensor> num_selected, double sm_scale,
                                                int64_t window, double softcap, bool return_page_lse) {
  const CurrentDevice device(q, "q");
  const KvPools pools = check_pools(k_pages, v_pages, k_scales, v_scales);
  Attention attention = check_attention(q, pools, sm_scale, softcap);
  const DecodeRows rows = check_decode_rows(q, cu_query_lens, seq_lens, page_table, pools.page_size, window);
  core::AttendPagesParams& params = attention.params;
  params.list_width = rows.batch.max_pages;
  const std::optional<PageLists> lists = check_page_lists(selected_pages, num_selected, q.size(0), params);
  const Tensor page_lse = make_page_lse(return_page_lse, q, params);
  launch_attend_pages(device, q, params, rows, params.list_width);
  return {attention.out, attention.lse, page_lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_decode(
    Tensor q, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor k_pages, Tensor v_pages,
    std::optional<Tensor> k_scales, std::optional<Tensor> v_scales, Tensor page_summary, Tensor page_budget,
    int64_t max_page_budget, std::string scorer, std::string group_reduction, double sm_scale,
    int64_t num_sink_pages, int64_t num_recent_pages, int64_t window, double softcap) {
  const CurrentDevice device(q, "q");
  const KvPools pools = check_pools(k_pages, v_pages, k_scales, v_scales);
  Attention attention = check_attention(q, pools, sm_scale, softcap);
  Tensor keep_q;
  const core::ScorePagesParams scoring = check_score_pages(
      q, keep_q, pools.num_kv_heads, pools.page_size, check_scorer_for(scorer, pools.k.type), group_reduction,
      sm_scale, page_summary, pools.num_pages);
  const DecodeRows rows = check_decode_rows(q, cu_query_lens, seq_lens, page_table, pools.page_size, window);
  const int32_t* budgets = check_page_budget(page_budget, rows.batch.batch_size, max_page_budget,
                                             num_sink_pages, num_recent_pages);
  const Selection selected = empty_selection(q, q.size(0), pools.num_kv_heads, max_page_budget);
  launch_score_and_select(device, q, scoring,
                          {.page_scores = nullptr,
                           .row_stride = 0,
                           .batch = {},
                           .page_budget = budgets,
                           .num_rows = 0,
                           .num_kv_heads = pools.num_kv_heads,
                           .page_size = pools.page_size,
                           .window = window,
                           .num_sink_pages = num_sink_pages,
                           .num_recent_pages = num_recent_pages,
                           .max_page_budget = max_page_budget,
                           .selected_pages = selected.page_data(),
                           .num_selected = selected.count_data()},
                          rows);
  core::AttendPagesParams& params = attention.params;
  params.selected_pages = selected.page_data();
  params.num_selected = selected.count_data();
  params.list_width = max_page_budget;
  launch_attend_pages(device, q, params, rows, std::min(max_page_budget, rows.batch.max_pages));
  return {attention.out, attention.lse, selected.pages, selected.counts};
}

}  // namespace

TINYSERVE_CUDA_OPS(m) {
  m.impl("attend_pages", TORCH_BOX(&attend_pages));
  m.impl("sparse_decode", TORCH_BOX(&sparse_decode));
}

}  // namespace tinyserve
