// Element types a tensor may carry into a kernel (conversions: cpu/simd.h). int8 is for K and V pages only,
// with one scale per token and head (core/page_pool_view.h).
// fp16 and bf16 are carried as their bits, so that no compiler support for either is needed.
#pragma once

#include <cstdint>
#include <cstring>

namespace tinyserve::core {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16, kInt8 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

constexpr int64_t element_size(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kInt8:
      return 1;
    case ElementType::kFloat16:
    case ElementType::kBFloat16:
      break;
  }
  return 2;
}

}  // namespace tinyserve::core
