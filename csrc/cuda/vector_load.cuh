// Loads of several neighbouring elements by one instruction, widened to fp32.
#pragma once

#include <cstdint>

#include "cuda/arch.cuh"
#include "cuda/codes.cuh"

namespace tinyserve::cuda {

// Words that one instruction loads, whatever type they were written as.
struct [[gnu::may_alias]] alignas(2) HalfWord {
  uint16_t x;
};
struct [[gnu::may_alias]] alignas(4) OneWord {
  uint32_t x;
};
struct [[gnu::may_alias]] alignas(8) TwoWords {
  uint32_t x, y;
};
struct [[gnu::may_alias]] alignas(16) FourWords {
  uint32_t x, y, z, w;
};

// kCount elements from an address that is aligned to them (to 16 bytes where they take more).
template <int kCount, typename T>
__device__ __forceinline__ void load_vector(const T* from, float (&x)[kCount]) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  if constexpr (kBytes == 2) {
    static_assert(sizeof(T) == 1, "Two bytes are two int8 codes.");
    const uint32_t flipped = reinterpret_cast<const HalfWord*>(from)->x ^ 0x8080U;
    x[0] = byte_to_float(flipped, 0, 128.0F);
    x[1] = byte_to_float(flipped, 1, 128.0F);
  } else if constexpr (kBytes == 4) {
    widen_word<T>(reinterpret_cast<const OneWord*>(from)->x, x);
  } else if constexpr (kBytes == 8) {
    const TwoWords words = *reinterpret_cast<const TwoWords*>(from);
    widen_word<T>(words.x, x);
    widen_word<T>(words.y, x + kPerWord);
  } else {
    static_assert(kBytes % 16 == 0, "Longer loads take 16 bytes each.");
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const FourWords words = reinterpret_cast<const FourWords*>(from)[i];
      float* to = x + 4 * i * kPerWord;
      widen_word<T>(words.x, to);
      widen_word<T>(words.y, to + kPerWord);
      widen_word<T>(words.z, to + 2 * kPerWord);
      widen_word<T>(words.w, to + 3 * kPerWord);
    }
  }
}

}  // namespace tinyserve::cuda
