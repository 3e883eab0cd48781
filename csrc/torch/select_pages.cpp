// select_pages: checks and the selection stage on its own.

#include <torch/csrc/stable/library.h>

#include "torch/decode_stages.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> select_pages(Tensor page_scores, Tensor cu_query_lens, Tensor seq_lens,
                                        Tensor page_budget, int64_t max_page_budget, int64_t page_size,
                                        int64_t num_sink_pages, int64_t num_recent_pages, int64_t window) {
  const core::ElementType type = check_element_type(page_scores, "page_scores");
  TINYSERVE_CHECK(type == core::ElementType::kFloat32,
                  "page_scores: expected dtype float32, got a 16-bit type");
  check_dim(page_scores, "page_scores", 3, "[num_tokens, num_kv_heads, max_pages]");
  const Tensor scores = page_scores.is_contiguous() ? page_scores : torch::stable::contiguous(page_scores);
  const int64_t num_rows = scores.size(0);
  const int64_t num_kv_heads = scores.size(1);
  const Batch batch =
      check_batch(cu_query_lens, seq_lens, nullptr, scores.size(2), num_rows, page_size, window, -1);
  const int32_t* budgets =
      check_page_budget(page_budget, batch, max_page_budget, num_sink_pages, num_recent_pages);
  Tensor selected_pages = empty_cpu({num_rows, num_kv_heads, max_page_budget}, ScalarType::Int);
  Tensor num_selected = empty_cpu({num_rows, num_kv_heads}, ScalarType::Int);
  run_select_pages({.page_scores = static_cast<const float*>(scores.const_data_ptr()),
                    .row_stride = scores.size(2),
                    .rows = batch.rows.data(),
                    .page_budget = budgets,
                    .num_kv_heads = num_kv_heads,
                    .page_size = page_size,
                    .num_sink_pages = num_sink_pages,
                    .num_recent_pages = num_recent_pages,
                    .max_page_budget = max_page_budget,
                    .selected_pages = static_cast<int32_t*>(selected_pages.mutable_data_ptr()),
                    .num_selected = static_cast<int32_t*>(num_selected.mutable_data_ptr())},
                   batch);
  return {selected_pages, num_selected};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tinyserve, CPU, m) { m.impl("select_pages", TORCH_BOX(&select_pages)); }

}  // namespace tinyserve
