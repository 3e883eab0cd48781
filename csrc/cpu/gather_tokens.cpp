// Copies a run of stored tokens out of their pages into a dense tensor, one kv head an item.

#include <type_traits>

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {

void gather_tokens(const core::GatherTokensParams& params, int64_t begin, int64_t end) {
  const core::PagePoolView& pool = params.pages;
  for (int64_t head = begin; head < end; ++head) {
    dispatch_element(pool.type, [&](auto* page_tag) {
      using Stored = std::remove_pointer_t<decltype(page_tag)>;
      dispatch_element(params.type, [&](auto* dense_tag) {
        auto* dense = static_cast<decltype(dense_tag)>(params.dense) + head * params.dense_head_stride;
        for (int64_t i = 0; i < params.num_tokens; ++i) {
          const int64_t position = params.first_token + i;
          const Stored* slot = pool.page<Stored>(params.page_table[position / params.page_size], head) +
                               position % params.page_size * pool.token_stride;
          for (int64_t d = 0; d < params.head_dim; ++d) {
            from_float(to_float(slot[d * pool.channel_stride]), dense[i * params.head_dim + d]);
          }
        }
      });
    });
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
