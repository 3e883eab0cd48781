// The only place that computes the address of a token inside a page pool. Logical shape
// [num_pages, num_kv_heads, page_size, head_dim]; the strides carry the layout. Two are in use:
// token-major (channel_stride 1) and channel-major (token_stride 1, keys only). Offsets are int64:
// page_id * page_stride passes 2^31 elements in pools of a few GiB. constexpr, so that CUDA kernels take
// them, too. int8 pages are symmetric with one fp32 scale per token and head beside them: value = scale *
// code (cpu/quantise.h).
#pragma once

#include <cstdint>

#include "core/element_type.h"

namespace tinyserve::core {

struct PagePoolView {
  void* data = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t num_pages = 0;
  int64_t page_stride = 0;  // in elements, as all strides here
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t channel_stride = 1;

  float* scales = nullptr;  // [num_pages, num_kv_heads, page_size], last stride 1; null unless int8
  int64_t scale_page_stride = 0;
  int64_t scale_head_stride = 0;

  constexpr bool channel_major() const { return channel_stride != 1; }

  template <typename T>
  constexpr T* page(int64_t page_id, int64_t head) const {
    return static_cast<T*>(data) + page_id * page_stride + head * head_stride;
  }

  // The scales of a page's tokens.
  constexpr float* token_scales(int64_t page_id, int64_t head) const {
    return scales + page_id * scale_page_stride + head * scale_head_stride;
  }
};

// Page summaries: uint8 [num_pages, num_kv_heads, summary_bytes], last stride 1.
struct PageSummaryView {
  uint8_t* data = nullptr;  // null where a caller keeps no summaries
  int64_t page_stride = 0;
  int64_t head_stride = 0;

  constexpr uint8_t* row(int64_t page_id, int64_t head) const {
    return data + page_id * page_stride + head * head_stride;
  }
};

}  // namespace tinyserve::core
