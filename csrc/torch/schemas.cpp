// The operators' schemas, the one definition of namespace `tinyserve`. Mutated arguments are marked (a!);
// implementations register in the file of their op, fakes in tinyserve_ops/fakes.py.

#include "torch/registration.h"

TINYSERVE_SCHEMAS(m) {
  m.def(
      "append_kv(Tensor k, Tensor v, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, "
      "Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!)? k_scales, Tensor(d!)? v_scales, "
      "Tensor(e!)? page_summary, str scorer) -> ()");
  m.def(
      "seal_pages(Tensor page_ids, Tensor k_pages, Tensor? k_scales, Tensor(a!) page_summary, str scorer) -> "
      "()");
  m.def(
      "score_pages(Tensor q, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor page_summary, "
      "int page_size, str scorer, str group_reduction, float sm_scale, int window=-1) -> Tensor");
  m.def(
      "select_pages(Tensor page_scores, Tensor cu_query_lens, Tensor seq_lens, Tensor page_budget, "
      "int max_page_budget, int page_size, int num_sink_pages, int num_recent_pages, int window=-1) "
      "-> (Tensor selected_pages, Tensor num_selected)");
  m.def(
      "attend_pages(Tensor q, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor k_pages, "
      "Tensor v_pages, Tensor? k_scales, Tensor? v_scales, Tensor? selected_pages, Tensor? num_selected, "
      "float sm_scale, int window=-1, float softcap=0.0, bool return_page_lse=False) "
      "-> (Tensor out, Tensor lse, Tensor page_lse)");
  m.def(
      "sparse_decode(Tensor q, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor k_pages, "
      "Tensor v_pages, Tensor? k_scales, Tensor? v_scales, Tensor page_summary, Tensor page_budget, "
      "int max_page_budget, str scorer, str group_reduction, float sm_scale, int num_sink_pages, "
      "int num_recent_pages, int window=-1, float softcap=0.0) "
      "-> (Tensor out, Tensor lse, Tensor selected_pages, Tensor num_selected)");
  m.def("merge_states(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)");
  m.def(
      "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor cu_query_lens, Tensor seq_lens, Tensor "
      "page_table, "
      "Tensor k_pages, Tensor v_pages, Tensor? k_scales, Tensor? v_scales, float sm_scale, int window=-1, "
      "float softcap=0.0) -> (Tensor out, Tensor lse)");
  m.def(
      "copy_pages(Tensor src_page_ids, Tensor dst_page_ids, Tensor(a!) k_pages, Tensor(b!) v_pages, "
      "Tensor(c!)? k_scales, Tensor(d!)? v_scales, Tensor(e!)? page_summary) -> ()");
  m.def(
      "gather_pages(Tensor page_ids, Tensor k_pages, Tensor v_pages, Tensor? k_scales, Tensor? v_scales, "
      "Tensor? page_summary) -> (Tensor k, Tensor v, Tensor k_scales, Tensor v_scales, Tensor page_summary)");
  m.def(
      "scatter_pages(Tensor page_ids, Tensor k, Tensor v, Tensor? k_scales_in, Tensor? v_scales_in, "
      "Tensor? summary_in, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!)? k_scales, Tensor(d!)? "
      "v_scales, "
      "Tensor(e!)? page_summary) -> ()");
}
