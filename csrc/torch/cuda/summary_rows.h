// What the CUDA kernels ask of the rows of page summaries: they load 16 bytes at a time.
#pragma once

#include <cstdint>

#include "core/scorer.h"
#include "torch/checks.h"

namespace tinyserve {

inline void check_summary_rows(const core::PageSummaryView& page_summary) {
  const auto aligned = [](int64_t bytes) { return bytes % core::kSummaryAlignment == 0; };
  TINYSERVE_CHECK(aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(page_summary.data))) &&
                      aligned(page_summary.page_stride) && aligned(page_summary.head_stride),
                  "page_summary: expected rows that begin at multiples of ", core::kSummaryAlignment,
                  " bytes, got others (a slice of a wider tensor, perhaps)");
}

}  // namespace tinyserve
