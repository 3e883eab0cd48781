// score_pages: checks and the scoring stage on its own.

#include <algorithm>
#include <limits>

#include "torch/decode_stages.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

Tensor score_pages(Tensor q, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor page_summary,
                   int64_t page_size, std::string scorer, std::string group_reduction, double sm_scale,
                   int64_t window) {
  check_page_size(page_size);
  check_dim(page_summary, "page_summary", 3, "[num_pages, num_kv_heads, summary_bytes]");
  const int64_t num_kv_heads = page_summary.size(1);
  Tensor keep_q;
  core::ScorePagesParams params =
      check_score_pages(q, keep_q, num_kv_heads, page_size, check_scorer(scorer), group_reduction, sm_scale,
                        page_summary, page_summary.size(0));
  const Batch batch = check_batch(cu_query_lens, seq_lens, &page_table, 0, q.size(0), page_size, window,
                                  page_summary.size(0));
  Tensor page_scores = empty_beside(q, {q.size(0), num_kv_heads, batch.max_pages}, ScalarType::Float);
  params.page_scores = static_cast<float*>(page_scores.mutable_data_ptr());
  params.row_stride = batch.max_pages;
  std::fill_n(params.page_scores, page_scores.numel(), -std::numeric_limits<float>::infinity());
  run_score_pages(params, batch);
  return page_scores;
}

}  // namespace

TINYSERVE_CPU_OPS(m) { m.impl("score_pages", TORCH_BOX(&score_pages)); }

}  // namespace tinyserve
