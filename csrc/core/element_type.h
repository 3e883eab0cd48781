// Element types a tensor may carry into a kernel (conversions: cpu/simd.h).
// fp16 and bf16 are carried as their bits, so that no compiler support for either is needed.
#pragma once

#include <cstdint>
#include <cstring>

namespace tinyserve::core {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

constexpr int64_t element_size(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

}  // namespace tinyserve::core
