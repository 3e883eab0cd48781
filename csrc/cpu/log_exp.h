// Exponential and logarithm for scores: log-sum-exp over the tokens of a page and over the heads of a group.
#pragma once

#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr float kLog2OfE = 1.44269504F;
inline constexpr float kLn2 = 0.693147181F;

// 2^x for x <= 0, relative error below 2e-7; 2^-126 below that, NaN stays NaN. Adding 1.5 * 2^23 + 127 leaves
// the nearest integer, biased as an exponent wants it, in the low bits; the polynomial (minimax, degree 5)
// takes the rest, at most 1/2.
inline F32x8 exp2_nonpositive(F32x8 x) {
  constexpr float kMagic = 12582912.0F + 127.0F;
  const F32x8 lowest = splat(-126.0F);
  x = lowest > x ? lowest : x;
  const F32x8 shifted = x + splat(kMagic);
  const F32x8 f = x - (shifted - splat(kMagic));
  F32x8 p = splat(0.00132765F);
  p = p * f + splat(0.00967554F);
  p = p * f + splat(0.05550713F);
  p = p * f + splat(0.2402212F);
  p = p * f + splat(0.69314697F);
  p = p * f + splat(1.00000007F);
  return p * reinterpret_cast<F32x8>(reinterpret_cast<I32x8>(shifted) << 23);
}

// Natural logarithm of normal positive numbers, absolute error below 2e-7 near 1, relative elsewhere; NaN
// stays NaN. Others give a finite number without meaning.
inline F32x8 log_positive(F32x8 x) {
  const I32x8 bits = reinterpret_cast<I32x8>(x);
  // x = 2^e m with m in [sqrt(1/2), sqrt(2)).
  const I32x8 e = (bits - 0x3f3504f3) >> 23;
  const F32x8 t = reinterpret_cast<F32x8>(bits - (e << 23)) - splat(1.0F);
  F32x8 p = splat(7.0376836292e-2F);
  p = p * t - splat(1.1514610310e-1F);
  p = p * t + splat(1.1676998740e-1F);
  p = p * t - splat(1.2420140846e-1F);
  p = p * t + splat(1.4249322787e-1F);
  p = p * t - splat(1.6668057665e-1F);
  p = p * t + splat(2.0000714765e-1F);
  p = p * t - splat(2.4999993993e-1F);
  p = p * t + splat(3.3333331174e-1F);
  const F32x8 exponent = __builtin_convertvector(e, F32x8);
  const F32x8 square = t * t;
  F32x8 y = square * t * p + exponent * splat(-2.12194440e-4F);
  y = y - splat(0.5F) * square;
  y = t + y + exponent * splat(0.693359375F);
  return select(x != x, x, y);
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
