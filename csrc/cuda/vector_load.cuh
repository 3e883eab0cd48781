// Loads of several neighbouring elements by one instruction, widened to fp32.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/arch.cuh"

namespace tinyserve::cuda {

// int8 to fp32 in two instructions of full rate each: with its sign bit flipped a code is unsigned and
// becomes the last byte of 2^23 + code + 128, which fp32 holds exactly. (The conversion instruction runs at a
// quarter of the rate.)
template <int kByte>
__device__ __forceinline__ float float_of_byte(uint32_t flipped) {
  constexpr float kOffset = 8388608.0F + 128.0F;
  return __uint_as_float(__byte_perm(flipped, 0x4b000000U, 0x7650 + kByte)) - kOffset;
}

// A 32-bit word of T to its numbers.
template <typename T>
__device__ __forceinline__ void widen_word(uint32_t word, float* x) {
  if constexpr (std::is_same_v<T, float>) {
    x[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000U);
  } else if constexpr (std::is_same_v<T, __half>) {
    __half2 pair;
    static_assert(sizeof(pair) == sizeof(word), "Two halves make a word.");
    memcpy(static_cast<void*>(&pair), &word, sizeof(pair));
    const float2 both = __half22float2(pair);
    x[0] = both.x;
    x[1] = both.y;
  } else {
    static_assert(std::is_same_v<T, int8_t>, "Pages hold fp32, fp16, bf16 or int8.");
    const uint32_t flipped = word ^ 0x80808080U;
    x[0] = float_of_byte<0>(flipped);
    x[1] = float_of_byte<1>(flipped);
    x[2] = float_of_byte<2>(flipped);
    x[3] = float_of_byte<3>(flipped);
  }
}

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
    x[0] = float_of_byte<0>(flipped);
    x[1] = float_of_byte<1>(flipped);
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
