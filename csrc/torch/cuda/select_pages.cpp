// select_pages in CUDA: checks and launch.

#include "cuda/select_pages.h"

#include "torch/cuda/device.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> select_pages(Tensor page_scores, Tensor cu_query_lens, Tensor seq_lens,
                                        Tensor page_budget, int64_t max_page_budget, int64_t page_size,
                                        int64_t num_sink_pages, int64_t num_recent_pages, int64_t window) {
  const CurrentDevice device(page_scores, "page_scores");
  const Tensor scores = check_page_scores(page_scores);
  check_page_size(page_size);
  check_window(window);
  const core::BatchView batch = check_batch_view(cu_query_lens, seq_lens, nullptr, scores.size(2));
  const int32_t* budgets =
      check_page_budget(page_budget, batch.batch_size, max_page_budget, num_sink_pages, num_recent_pages);
  const Selection selection = empty_selection(scores, scores.size(0), scores.size(1), max_page_budget);
  const core::SelectPagesBatchParams params{.page_scores = static_cast<const float*>(scores.const_data_ptr()),
                                            .row_stride = scores.size(2),
                                            .batch = batch,
                                            .page_budget = budgets,
                                            .num_rows = scores.size(0),
                                            .num_kv_heads = scores.size(1),
                                            .page_size = page_size,
                                            .window = window,
                                            .num_sink_pages = num_sink_pages,
                                            .num_recent_pages = num_recent_pages,
                                            .max_page_budget = max_page_budget,
                                            .selected_pages = selection.page_data(),
                                            .num_selected = selection.count_data()};
  device.check_launched(cuda::select_pages(params, device.stream()), "select_pages");
  return {selection.pages, selection.counts};
}

}  // namespace

TINYSERVE_CUDA_OPS(m) { m.impl("select_pages", TORCH_BOX(&select_pages)); }

}  // namespace tinyserve
