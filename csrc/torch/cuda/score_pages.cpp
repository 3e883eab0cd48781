// score_pages in CUDA: checks and the scoring stage on its own.

#include "torch/cuda/decode_stages.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

Tensor score_pages(Tensor q, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor page_summary,
                   int64_t page_size, std::string scorer, std::string group_reduction, double sm_scale,
                   int64_t window) {
  const CurrentDevice device(q, "q");
  check_page_size(page_size);
  check_dim(page_summary, "page_summary", 3, "[num_pages, num_kv_heads, summary_bytes]");
  const int64_t num_kv_heads = page_summary.size(1);
  Tensor keep_q;
  const core::ScorePagesParams scoring =
      check_score_pages(q, keep_q, num_kv_heads, page_size, check_scorer(scorer), group_reduction, sm_scale,
                        page_summary, page_summary.size(0));
  const DecodeRows rows = check_decode_rows(q, cu_query_lens, seq_lens, page_table, page_size, window);
  const Tensor page_scores =
      empty_beside(q, {q.size(0), num_kv_heads, rows.batch.max_pages}, ScalarType::Float);
  launch_score_pages(device, q, scoring, rows, static_cast<float*>(page_scores.mutable_data_ptr()));
  return page_scores;
}

}  // namespace

TINYSERVE_CUDA_OPS(m) { m.impl("score_pages", TORCH_BOX(&score_pages)); }

}  // namespace tinyserve
