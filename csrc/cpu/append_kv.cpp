// Writes new keys and values into their pages (quantised where the pages are int8) and seals each page that
// fills.

#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/quantise.h"
#include "cpu/simd.h"
#include "cpu/summarise.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Writes `count` tokens of one head to the page's slots from `first_slot` on.
void write_tokens(const core::PackedView& from, int64_t first_token, int64_t count, int64_t head,
                  int64_t head_dim, const core::PagePoolView& pool, int64_t page_id, int64_t first_slot) {
  dispatch_page_element(pool.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    float row[core::kMaxHeadDim];
    T* page = pool.page<T>(page_id, head);
    for (int64_t i = 0; i < count; ++i) {
      load_row(from.data, from.type, (first_token + i) * from.token_stride + head * from.head_stride,
               head_dim, row);
      T* slot = page + (first_slot + i) * pool.token_stride;
      if constexpr (std::is_same_v<T, int8_t>) {
        int8_t codes[core::kMaxHeadDim];
        pool.token_scales(page_id, head)[first_slot + i] = quantise_row(row, head_dim, codes);
        for (int64_t d = 0; d < head_dim; ++d) slot[d * pool.channel_stride] = codes[d];
      } else {
        for (int64_t d = 0; d < head_dim; ++d) from_float(row[d], slot[d * pool.channel_stride]);
      }
    }
  });
}

}  // namespace

void append_kv(const core::AppendKvParams& params, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t head = item % params.num_kv_heads;
    const core::PageWrite& write = params.writes[item / params.num_kv_heads];
    write_tokens(params.k, write.first_token, write.num_tokens, head, params.head_dim, params.k_pages,
                 write.page_id, write.first_slot);
    write_tokens(params.v, write.first_token, write.num_tokens, head, params.head_dim, params.v_pages,
                 write.page_id, write.first_slot);
    const bool fills = write.first_slot + write.num_tokens == params.page_size;
    if (fills && params.scorer != nullptr) {
      summarise_page(params.k_pages, write.page_id, head, params.page_size, params.head_dim, *params.scorer,
                     params.page_summary.row(write.page_id, head));
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
