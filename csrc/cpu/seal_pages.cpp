// Computes the summary of a full page from the keys attention will read.

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "cpu/summarise.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {

void seal_pages(const core::SealPagesParams& params, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t head = item % params.num_kv_heads;
    const int64_t page_id = params.page_ids[item / params.num_kv_heads];
    summarise_page(params.k_pages, page_id, head, params.page_size, params.head_dim, *params.scorer,
                   params.page_summary.row(page_id, head));
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
