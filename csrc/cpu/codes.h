// Rounding to integer codes, eight at a time.
#pragma once

#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline F32x8 absolute(F32x8 x) { return select(x < splat(0.0F), -x, x); }

// The nearest integer, halves away from zero, clamped to [-max_code, max_code].
inline F32x8 nearest_code(F32x8 x, float max_code) {
  F32x8 magnitude = absolute(x) + splat(0.5F);
  magnitude = magnitude < splat(max_code) ? magnitude : splat(max_code);
  const F32x8 code = __builtin_convertvector(__builtin_convertvector(magnitude, I32x8), F32x8);
  return select(x < splat(0.0F), -code, code);
}

// Eight codes as int8.
inline void store_codes(F32x8 codes, void* to) {
  typedef int8_t I8x8 __attribute__((vector_size(8)));
  const I8x8 narrow = __builtin_convertvector(__builtin_convertvector(codes, I32x8), I8x8);
  __builtin_memcpy(to, &narrow, sizeof(narrow));
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
