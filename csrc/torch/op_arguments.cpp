#include "torch/op_arguments.h"

#include <limits>

#include "core/limits.h"

namespace tinyserve {

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

AppendArguments check_append_kv(const Tensor& k, const Tensor& v, const Tensor& k_pages,
                                const Tensor& v_pages, const std::optional<Tensor>& k_scales,
                                const std::optional<Tensor>& v_scales,
                                const std::optional<Tensor>& page_summary, const std::string& scorer) {
  AppendArguments arguments;
  arguments.pools = check_pools(k_pages, v_pages, k_scales, v_scales);
  const KvPools& pools = arguments.pools;
  arguments.k = check_packed(k, "k", arguments.keep_k);
  arguments.v = check_packed(v, "v", arguments.keep_v);
  check_size(k, "k", 1, pools.num_kv_heads, "num_kv_heads of k_pages");
  check_size(k, "k", 2, pools.head_dim, "head_dim of k_pages");
  check_same_shape(v, "v", k, "k");
  if (page_summary.has_value()) {
    arguments.scorer = check_scorer_for(scorer, pools.k.type);
    arguments.page_summary = check_summary(*page_summary, *arguments.scorer, pools.num_pages,
                                           pools.num_kv_heads, pools.head_dim, pools.page_size);
  }
  return arguments;
}

core::SealPagesParams check_seal_pages(const Tensor& k_pages, const std::optional<Tensor>& k_scales,
                                       const Tensor& page_summary, const std::string& scorer_name) {
  const core::PagePoolView pool = check_k_pages(k_pages, k_scales);
  const core::Scorer* scorer = check_scorer_for(scorer_name, pool.type);
  return {.page_ids = nullptr,
          .num_kv_heads = k_pages.size(1),
          .head_dim = k_pages.size(3),
          .page_size = k_pages.size(2),
          .k_pages = pool,
          .page_summary = check_summary(page_summary, *scorer, pool.num_pages, k_pages.size(1),
                                        k_pages.size(3), k_pages.size(2)),
          .scorer = scorer};
}

core::ScorePagesParams check_score_pages(const Tensor& q, Tensor& keep_q, int64_t num_kv_heads,
                                         int64_t page_size, const core::Scorer* scorer,
                                         const std::string& group_reduction, double sm_scale,
                                         const Tensor& page_summary, int64_t num_pages) {
  const std::optional<core::GroupReduction> reduction = core::find_group_reduction(group_reduction);
  const bool exists =
      reduction.has_value() && (scorer->linear() || *reduction != core::GroupReduction::kMean);
  TINYSERVE_CHECK(exists, "group_reduction: expected one of ", scorer->linear() ? "mean, " : "",
                  "max, softmax for scorer '", std::string(scorer->name), "', got '", group_reduction, "'");
  const core::PackedView view = check_packed(q, "q", keep_q);
  check_head_dim(q.size(2));
  return {.q = view,
          .rows = nullptr,
          .num_kv_heads = num_kv_heads,
          .group_size = check_group_size(q.size(1), num_kv_heads),
          .head_dim = q.size(2),
          .page_size = page_size,
          .max_chunks = 0,
          .page_summary = check_summary(page_summary, *scorer, num_pages, num_kv_heads, q.size(2), page_size),
          .scorer = scorer,
          .group_reduction = *reduction,
          .sm_scale = static_cast<float>(sm_scale),
          .page_scores = nullptr,
          .head_scores = nullptr,
          .row_stride = 0};
}

Tensor check_page_scores(const Tensor& page_scores) {
  const core::ElementType type = check_element_type(page_scores, "page_scores");
  TINYSERVE_CHECK(type == core::ElementType::kFloat32,
                  "page_scores: expected dtype float32, got a 16-bit type");
  check_dim(page_scores, "page_scores", 3, "[num_tokens, num_kv_heads, max_pages]");
  return dense(page_scores);
}

Selection empty_selection(const Tensor& beside, int64_t num_rows, int64_t num_kv_heads,
                          int64_t max_page_budget) {
  return {empty_beside(beside, {num_rows, num_kv_heads, max_page_budget}, ScalarType::Int),
          empty_beside(beside, {num_rows, num_kv_heads}, ScalarType::Int)};
}

Attention check_attention(const Tensor& q, const KvPools& pools, double sm_scale, double softcap) {
  check_softcap(softcap);
  Tensor keep_q;
  const core::PackedView view = check_packed(q, "q", keep_q);
  check_size(q, "q", 2, pools.head_dim, "head_dim of k_pages");
  const int64_t group_size = check_group_size(q.size(1), pools.num_kv_heads);
  Tensor out = empty_beside(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  Tensor lse = empty_beside(q, {q.size(0), q.size(1)}, ScalarType::Float);
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

std::optional<PageLists> check_page_lists(const std::optional<Tensor>& selected_pages,
                                          const std::optional<Tensor>& num_selected, int64_t num_rows,
                                          core::AttendPagesParams& params) {
  TINYSERVE_CHECK(selected_pages.has_value() == num_selected.has_value(),
                  "num_selected: expected a tensor exactly where selected_pages is one, got one of the two");
  if (!selected_pages.has_value()) return std::nullopt;
  check_int32(*selected_pages, "selected_pages", 3, "[num_tokens, num_kv_heads, max_page_budget]");
  check_int32(*num_selected, "num_selected", 2, "[num_tokens, num_kv_heads]");
  for (int64_t axis = 0; axis < 2; ++axis) {
    const int64_t expected = axis == 0 ? num_rows : params.num_kv_heads;
    const char* meaning = axis == 0 ? "num_tokens" : "num_kv_heads";
    check_size(*selected_pages, "selected_pages", axis, expected, meaning);
    check_size(*num_selected, "num_selected", axis, expected, meaning);
  }
  PageLists lists{dense(*selected_pages), dense(*num_selected)};
  params.selected_pages = static_cast<const int32_t*>(lists.pages.const_data_ptr());
  params.num_selected = static_cast<const int32_t*>(lists.counts.const_data_ptr());
  params.list_width = lists.pages.size(2);
  return lists;
}

Tensor make_page_lse(bool wanted, const Tensor& q, core::AttendPagesParams& params) {
  if (!wanted) return empty_beside(q, {0}, ScalarType::Float);
  Tensor page_lse = empty_beside(q, {q.size(0), q.size(1), params.list_width}, ScalarType::Float);
  torch::stable::fill_(page_lse, -std::numeric_limits<double>::infinity());
  params.page_lse = static_cast<float*>(page_lse.mutable_data_ptr());
  return page_lse;
}

MergeArguments check_merge_states(const Tensor& outs, const Tensor& lses) {
  const core::ElementType type = check_element_type(outs, "outs");
  check_dim(outs, "outs", 4, "[num_states, num_tokens, num_heads, head_dim]");
  check_head_dim(outs.size(3));
  TINYSERVE_CHECK(check_element_type(lses, "lses") == core::ElementType::kFloat32,
                  "lses: expected dtype float32, got a 16-bit type");
  check_dim(lses, "lses", 3, "[num_states, num_tokens, num_heads]");
  for (int64_t axis = 0; axis < 3; ++axis) check_size(lses, "lses", axis, outs.size(axis), "as outs");
  MergeArguments arguments{
      .params = {},
      .keep_outs = dense(outs),
      .keep_lses = dense(lses),
      .out = empty_beside(outs, {outs.size(1), outs.size(2), outs.size(3)}, outs.scalar_type()),
      .lse = empty_beside(outs, {outs.size(1), outs.size(2)}, ScalarType::Float)};
  arguments.params = {.outs = arguments.keep_outs.const_data_ptr(),
                      .lses = static_cast<const float*>(arguments.keep_lses.const_data_ptr()),
                      .type = type,
                      .num_states = outs.size(0),
                      .num_rows_heads = outs.size(1) * outs.size(2),
                      .head_dim = outs.size(3),
                      .out = arguments.out.mutable_data_ptr(),
                      .lse = static_cast<float*>(arguments.lse.mutable_data_ptr())};
  return arguments;
}

PrefillArguments check_prefill_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& k_pages, const Tensor& v_pages,
                                         const std::optional<Tensor>& k_scales,
                                         const std::optional<Tensor>& v_scales, double sm_scale,
                                         int64_t window, double softcap) {
  PrefillArguments arguments;
  arguments.pools = check_pools(k_pages, v_pages, k_scales, v_scales);
  const KvPools& pools = arguments.pools;
  check_softcap(softcap);
  check_window(window);
  core::PrefillAttentionParams& params = arguments.params;
  params = {.q = check_packed(q, "q", arguments.keep_q),
            .k = check_packed(k, "k", arguments.keep_k),
            .v = check_packed(v, "v", arguments.keep_v),
            .blocks = nullptr,
            .num_kv_heads = pools.num_kv_heads,
            .group_size = check_group_size(q.size(1), pools.num_kv_heads),
            .head_dim = pools.head_dim,
            .page_size = pools.page_size,
            .k_pages = pools.k,
            .v_pages = pools.v,
            .window = window,
            .sm_scale = static_cast<float>(sm_scale),
            .out = nullptr,
            .lse = nullptr};
  check_size(q, "q", 2, pools.head_dim, "head_dim of k_pages");
  check_size(k, "k", 0, q.size(0), "num_tokens of q");
  check_size(k, "k", 1, pools.num_kv_heads, "num_kv_heads of k_pages");
  check_size(k, "k", 2, pools.head_dim, "head_dim of k_pages");
  check_same_shape(v, "v", k, "k");
  TINYSERVE_CHECK(params.group_size <= core::kPrefillQueries, "q: expected at most ", core::kPrefillQueries,
                  " query heads per kv head, got ", params.group_size);
  arguments.out = empty_beside(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  arguments.lse = empty_beside(q, {q.size(0), q.size(1)}, ScalarType::Float);
  params.out = arguments.out.mutable_data_ptr();
  params.lse = static_cast<float*>(arguments.lse.mutable_data_ptr());
  return arguments;
}

}  // namespace tinyserve
