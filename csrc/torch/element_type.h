// torch's scalar types that kernels take, shared by the CPU and the CUDA library file.
#pragma once

#include <optional>

#include <torch/headeronly/core/ScalarType.h>

#include "core/element_type.h"

namespace tinyserve {

inline std::optional<core::ElementType> element_type_of(torch::headeronly::ScalarType type) {
  switch (type) {
    case torch::headeronly::ScalarType::Float:
      return core::ElementType::kFloat32;
    case torch::headeronly::ScalarType::Half:
      return core::ElementType::kFloat16;
    case torch::headeronly::ScalarType::BFloat16:
      return core::ElementType::kBFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace tinyserve
