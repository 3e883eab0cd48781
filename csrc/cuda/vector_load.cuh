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

// kCount elements from an address that is aligned to them (to 16 bytes where they take more).
template <int kCount, typename T>
__device__ __forceinline__ void load_vector(const T* from, float (&x)[kCount]) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if constexpr (kBytes == 2) {  // two int8
    uint16_t half_word;
    memcpy(&half_word, __builtin_assume_aligned(from, 2), 2);
    const uint32_t flipped = half_word ^ 0x8080U;
    x[0] = float_of_byte<0>(flipped);
    x[1] = float_of_byte<1>(flipped);
  } else {
    constexpr int kWords = kBytes / 4;
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    uint32_t words[kWords];
    if constexpr (kBytes >= 16) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        uint4 four;
        memcpy(&four, __builtin_assume_aligned(reinterpret_cast<const unsigned char*>(from) + 16 * i, 16),
               16);
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
      }
    } else {
      memcpy(words, __builtin_assume_aligned(from, kBytes), kBytes);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) widen_word<T>(words[i], x + i * kPerWord);
  }
}

}  // namespace tinyserve::cuda
