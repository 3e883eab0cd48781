// Declarations of this target's kernels; included only by the per-target sources.
#pragma once

#include "cpu/kernel_table.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {

void append_kv(const core::AppendKvParams& params, int64_t begin, int64_t end);
void seal_pages(const core::SealPagesParams& params, int64_t begin, int64_t end);
void score_pages(const core::ScorePagesParams& params, int64_t begin, int64_t end);
void select_pages(const core::SelectPagesParams& params, int64_t begin, int64_t end);
void attend_pages(const core::AttendPagesParams& params, int64_t begin, int64_t end);
void merge_states(const core::MergeStatesParams& params, int64_t begin, int64_t end);
void prefill_attention(const core::PrefillAttentionParams& params, int64_t begin, int64_t end);

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
