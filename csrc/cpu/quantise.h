// One token and head of an int8 page: symmetric codes with one fp32 scale, value = scale * code.
// Largest magnitude / 127 is the scale, so the error of a value is at most half a scale. A row that holds a
// NaN or an infinity has no scale: it is stored as NaN times 0, and whoever attends to it reads NaN.
#pragma once

#include "cpu/codes.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Writes the codes of `row` [head_dim] and returns their scale. Codes are value / scale (a true division, as
// the reference has it), rounded to nearest, ties to even.
inline float quantise_row(const float* row, int64_t head_dim, int8_t* codes) {
  F32x8 largest = splat(0.0F);
  I32x8 finite = largest == largest;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const F32x8 x = load(row + d);
    const F32x8 magnitude = absolute(x);
    finite &= magnitude <= splat(kLargestFloat);
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool all_finite = lane_mask(finite) == 0xffU;
  const float scale = all_finite ? horizontal_maximum(largest) / 127.0F : __builtin_nanf("");
  if (!(scale > 0.0F)) {
    __builtin_memset(codes, 0, static_cast<size_t>(head_dim));
    return scale;
  }
  // A scale of a few units in the last place of zero may give ratios somewhat above 127, which the clamp
  // takes back.
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    F32x8 ratio = load(row + d) / splat(scale);
    ratio = ratio > splat(127.0F) ? splat(127.0F) : (ratio < splat(-127.0F) ? splat(-127.0F) : ratio);
    const I32x8 code = nearest_even(ratio);
    for (int i = 0; i < kLanes; ++i) codes[d + i] = static_cast<int8_t>(code[i]);
  }
  return scale;
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
