// The keys of one full page and kv head as attention reads them, widened to fp32 and token-major, whatever
// the layout and element type of the pool.
#pragma once

#include <type_traits>

#include "core/page_pool_view.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// keys: [page_size, head_dim]
inline void load_page_keys(const core::PagePoolView& pool, int64_t page_id, int64_t head, int64_t page_size,
                           int64_t head_dim, float* keys) {
  dispatch_page_element(pool.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* page = pool.page<T>(page_id, head);
    for (int64_t t = 0; t < page_size; ++t) {
      const T* token = page + t * pool.token_stride;
      if (pool.channel_major()) {
        for (int64_t d = 0; d < head_dim; ++d) {
          keys[t * head_dim + d] = to_float(token[d * pool.channel_stride]);
        }
      } else {
        load_row(token, head_dim, keys + t * head_dim);
      }
    }
  });
  if (pool.scales == nullptr) return;
  const float* scales = pool.token_scales(page_id, head);
  for (int64_t t = 0; t < page_size; ++t) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      float* channels = keys + t * head_dim + d;
      store(channels, splat(scales[t]) * load(channels));
    }
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
