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

// The nearest integer, halves to even, for |x| below 2^22: adding 1.5 * 2^23 rounds, and leaves the integer
// in the low bits.
inline I32x8 nearest_even(F32x8 x) {
  const F32x8 shift = splat(12582912.0F);
  return reinterpret_cast<I32x8>(x + shift) - reinterpret_cast<I32x8>(shift);
}

// Eight codes as int8.
inline void store_codes(F32x8 codes, void* to) {
  typedef int8_t I8x8 __attribute__((vector_size(8)));
  const I8x8 narrow = __builtin_convertvector(__builtin_convertvector(codes, I32x8), I8x8);
  __builtin_memcpy(to, &narrow, sizeof(narrow));
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
