// ldmatrix and mma as warp collectives. Which lane holds which element is that of the PTX ISA ("Matrix
// fragments for mma.m16n8k16", "... m16n8k32", "ldmatrix"). Sums are exact in fp64 for 16-bit inputs of like
// size, then rounded once; hardware rounds in an order of its own, so tests must allow for that.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_emulator/machine.h"

namespace tinyserve::cuda::emulator {

void ldmatrix(const Site& site, uint32_t* fragment, int count, bool transposed, const void* row);

inline double as_number(__half x) { return __half2float(x); }
inline double as_number(__nv_bfloat16 x) { return __bfloat162float(x); }
inline int32_t as_number(int8_t x) { return x; }

// d [16 x 8] += a [16 x k] * b [k x 8]; k is 16 elements of 16 bits or 32 of 8.
template <typename T, typename Accumulator>
void mma(const Site& site, Accumulator (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr int kPerRegister = 4 / static_cast<int>(sizeof(T));
  const uint32_t mine[] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const std::shared_ptr<const LaneValues> lanes = exchange(site, 0xffffffffU, mine, sizeof(mine));
  const auto element_of = [&](int lane, int reg, int element) {
    return as_number(lanes->of<T>(lane, static_cast<size_t>(4 * reg) + element * sizeof(T)));
  };
  // Four neighbouring lanes hold the columns of a row of a: kPerRegister each, from two halves of k.
  constexpr int kHalf = 4 * kPerRegister;
  for (int i = 0; i < 4; ++i) {
    const int row = lane_id() / 4 + i / 2 * 8;
    const int column = lane_id() % 4 * 2 + i % 2;
    auto sum = static_cast<decltype(as_number(T{}))>(d[i]);
    for (int k = 0; k < 2 * kHalf; ++k) {
      const int half = k / kHalf;
      const int neighbour = k % kHalf / kPerRegister;
      const int element = k % kPerRegister;
      sum += element_of(row % 8 * 4 + neighbour, 2 * half + row / 8, element) *
             element_of(column * 4 + neighbour, 4 + half, element);
    }
    d[i] = static_cast<Accumulator>(sum);
  }
}

}  // namespace tinyserve::cuda::emulator
