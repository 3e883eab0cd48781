// The element types of tensors on the device: conversions from and to fp32, rounding to nearest even, and the
// choice of a type at run time.
#pragma once

#include <cstdint>

#include "core/element_type.h"
#include "cuda/arch.cuh"

namespace tinyserve::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void from_float(float x, float& out) { out = x; }
__device__ __forceinline__ void from_float(float x, __half& out) { out = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

template <typename T>
inline constexpr core::ElementType element_type_of = core::ElementType::kFloat32;
template <>
inline constexpr core::ElementType element_type_of<__half> = core::ElementType::kFloat16;
template <>
inline constexpr core::ElementType element_type_of<__nv_bfloat16> = core::ElementType::kBFloat16;
template <>
inline constexpr core::ElementType element_type_of<int8_t> = core::ElementType::kInt8;

// Calls f with a null pointer to the element type of a tensor that isn't int8.
template <typename F>
cudaError_t dispatch_element(core::ElementType type, const F& f) {
  switch (type) {
    case core::ElementType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case core::ElementType::kFloat16:
      return f(static_cast<__half*>(nullptr));
    case core::ElementType::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case core::ElementType::kInt8:
      break;
  }
  return cudaErrorInvalidValue;
}

// The same with int8, for pages.
template <typename F>
cudaError_t dispatch_page_element(core::ElementType type, const F& f) {
  return type == core::ElementType::kInt8 ? f(static_cast<int8_t*>(nullptr)) : dispatch_element(type, f);
}

}  // namespace tinyserve::cuda
