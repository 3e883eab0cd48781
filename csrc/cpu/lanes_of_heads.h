// Reductions over the lanes of one vector per query head, for up to four heads at once: a tree of transposes
// costs little more than the reduction of a single vector, and the results lie side by side.
#pragma once

#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

typedef float F32x4 __attribute__((vector_size(16)));
typedef int32_t I32x4 __attribute__((vector_size(16)));

inline F32x4 splat4(float x) { return F32x4{x, x, x, x}; }
inline F32x4 load4(const float* p) {
  F32x4 x;
  __builtin_memcpy(&x, p, 16);
  return x;
}
inline void store4(float* p, F32x4 x) { __builtin_memcpy(p, &x, 16); }
inline F32x4 select4(I32x4 mask, F32x4 yes, F32x4 no) {
  return reinterpret_cast<F32x4>((mask & reinterpret_cast<I32x4>(yes)) |
                                 (~mask & reinterpret_cast<I32x4>(no)));
}

inline F32x4 low_half(F32x8 x) { return F32x4{x[0], x[1], x[2], x[3]}; }
inline F32x4 high_half(F32x8 x) { return F32x4{x[4], x[5], x[6], x[7]}; }
inline I32x4 low_half(I32x8 x) { return I32x4{x[0], x[1], x[2], x[3]}; }
inline I32x4 high_half(I32x8 x) { return I32x4{x[4], x[5], x[6], x[7]}; }

// Lane h of the result: vector h of kHeads reduced with `join`, the same way for every h and kHeads.
template <int kHeads, typename Wide, typename Join>
inline auto reduce_heads(const Wide* heads, const Join& join) {
  using Half = decltype(low_half(heads[0]));
  Half half[4];
  for (int h = 0; h < 4; ++h) {
    half[h] = h < kHeads ? join(low_half(heads[h]), high_half(heads[h])) : half[0];
  }
  const auto pair = [&](Half a, Half b) {
    return join(Half{a[0], b[0], a[1], b[1]}, Half{a[2], b[2], a[3], b[3]});
  };
  const Half first = pair(half[0], half[1]);
  const Half second = pair(half[2], half[3]);
  return join(Half{first[0], first[1], second[0], second[1]}, Half{first[2], first[3], second[2], second[3]});
}

template <int kHeads, typename Wide>
inline auto sum_heads(const Wide* heads) {
  return reduce_heads<kHeads>(heads, [](auto a, auto b) { return a + b; });
}

// NaN lanes lose.
template <int kHeads>
inline F32x4 max_heads(const F32x8* heads) {
  return reduce_heads<kHeads>(heads, [](F32x4 a, F32x4 b) { return a > b ? a : b; });
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
