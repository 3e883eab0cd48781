// The arguments of each op, checked and turned into the parameters of its kernel, as far as that is the same
// on the CPU and in CUDA. Results are allocated here, too; nothing is launched and no data is read.
#pragma once

#include <optional>
#include <string>

#include "core/params.h"
#include "torch/checks.h"

namespace tinyserve {

// A contiguous tensor of the same values.
Tensor dense(const Tensor& tensor);

struct AppendArguments {
  KvPools pools;
  core::PackedView k;
  core::PackedView v;
  core::PageSummaryView page_summary;  // null where none are kept
  const core::Scorer* scorer = nullptr;
  Tensor keep_k, keep_v;
};
AppendArguments check_append_kv(const Tensor& k, const Tensor& v, const Tensor& k_pages,
                                const Tensor& v_pages, const std::optional<Tensor>& k_scales,
                                const std::optional<Tensor>& v_scales,
                                const std::optional<Tensor>& page_summary, const std::string& scorer);

// All but page_ids.
core::SealPagesParams check_seal_pages(const Tensor& k_pages, const std::optional<Tensor>& k_scales,
                                       const Tensor& page_summary, const std::string& scorer);

// All but the rows and the scores. `keep_q` must outlive the result.
core::ScorePagesParams check_score_pages(const Tensor& q, Tensor& keep_q, int64_t num_kv_heads,
                                         int64_t page_size, const core::Scorer* scorer,
                                         const std::string& group_reduction, double sm_scale,
                                         const Tensor& page_summary, int64_t num_pages);

// Contiguous fp32 scores [num_tokens, num_kv_heads, max_pages].
Tensor check_page_scores(const Tensor& page_scores);

// Selections of `num_rows` rows, allocated.
struct Selection {
  Tensor pages;   // int32 [num_rows, num_kv_heads, max_page_budget]
  Tensor counts;  // int32 [num_rows, num_kv_heads]

  int32_t* page_data() const { return static_cast<int32_t*>(pages.mutable_data_ptr()); }
  int32_t* count_data() const { return static_cast<int32_t*>(counts.mutable_data_ptr()); }
};
Selection empty_selection(const Tensor& beside, int64_t num_rows, int64_t num_kv_heads,
                          int64_t max_page_budget);

// What attention over pages needs of q and the pools; results allocated.
struct Attention {
  core::AttendPagesParams params;  // without rows, lists and scratch
  Tensor keep_q;
  Tensor out;
  Tensor lse;
};
Attention check_attention(const Tensor& q, const KvPools& pools, double sm_scale, double softcap);

// Page lists of a user into `params`; both or neither. The result must outlive `params`.
struct PageLists {
  Tensor pages;
  Tensor counts;
};
std::optional<PageLists> check_page_lists(const std::optional<Tensor>& selected_pages,
                                          const std::optional<Tensor>& num_selected, int64_t num_rows,
                                          core::AttendPagesParams& params);

// page_lse of the width of the lists, filled with -inf, into `params`; of size 0 where it is not wanted.
Tensor make_page_lse(bool wanted, const Tensor& q, core::AttendPagesParams& params);

struct MergeArguments {
  core::MergeStatesParams params;
  Tensor keep_outs, keep_lses;
  Tensor out, lse;
};
MergeArguments check_merge_states(const Tensor& outs, const Tensor& lses);

// All but the blocks.
struct PrefillArguments {
  KvPools pools;
  core::PrefillAttentionParams params;
  Tensor keep_q, keep_k, keep_v;
  Tensor out, lse;
};
PrefillArguments check_prefill_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& k_pages, const Tensor& v_pages,
                                         const std::optional<Tensor>& k_scales,
                                         const std::optional<Tensor>& v_scales, double sm_scale,
                                         int64_t window, double softcap);

}  // namespace tinyserve
