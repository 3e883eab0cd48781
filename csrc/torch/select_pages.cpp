// select_pages: checks and the selection stage on its own.

#include "torch/decode_stages.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> select_pages(Tensor page_scores, Tensor cu_query_lens, Tensor seq_lens,
                                        Tensor page_budget, int64_t max_page_budget, int64_t page_size,
                                        int64_t num_sink_pages, int64_t num_recent_pages, int64_t window) {
  const Tensor scores = check_page_scores(page_scores);
  const int64_t num_rows = scores.size(0);
  const int64_t num_kv_heads = scores.size(1);
  const Batch batch =
      check_batch(cu_query_lens, seq_lens, nullptr, scores.size(2), num_rows, page_size, window, -1);
  const int32_t* budgets =
      check_page_budgets(page_budget, batch, max_page_budget, num_sink_pages, num_recent_pages);
  const Selection selection = empty_selection(scores, num_rows, num_kv_heads, max_page_budget);
  run_select_pages({.page_scores = static_cast<const float*>(scores.const_data_ptr()),
                    .row_stride = scores.size(2),
                    .rows = batch.rows.data(),
                    .page_budget = budgets,
                    .num_kv_heads = num_kv_heads,
                    .page_size = page_size,
                    .num_sink_pages = num_sink_pages,
                    .num_recent_pages = num_recent_pages,
                    .max_page_budget = max_page_budget,
                    .selected_pages = selection.page_data(),
                    .num_selected = selection.count_data()},
                   batch);
  return {selection.pages, selection.counts};
}

}  // namespace

TINYSERVE_CPU_OPS(m) { m.impl("select_pages", TORCH_BOX(&select_pages)); }

}  // namespace tinyserve
