// Words of memory as numbers: of pages, and of page summaries, which are read eight numbers at a time. And
// the rounding of numbers to codes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/arch.cuh"

namespace tinyserve::cuda {

// Byte i of a word as a number, less `offset`. Placed behind the exponent of 2^23 the byte becomes a float
// without a conversion, of which a multiprocessor does only a few per cycle.
__device__ __forceinline__ float byte_to_float(uint32_t word, int i, float offset) {
  constexpr uint32_t kExponent = 0x4b000000U;
  constexpr float kOfExponent = 8388608.0F;
  return __uint_as_float(__byte_perm(word, kExponent, 0x7440U + static_cast<unsigned>(i))) -
         (kOfExponent + offset);
}

// A word of T as its one, two or four numbers.
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
    static_assert(std::is_same_v<T, int8_t>, "Pages and summaries hold fp32, fp16, bf16 or int8.");
    const uint32_t unsigned_bytes = word ^ 0x80808080U;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = byte_to_float(unsigned_bytes, i, 128.0F);
  }
}

// Two numbers rounded to a word of T, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, static_cast<const void*>(&pair), sizeof(word));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>, "Two numbers of 16 bits make a word.");
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, static_cast<const void*>(&pair), sizeof(word));
  }
  return word;
}

// The int4 codes in the low or the high halves of a word's bytes, stored plus 8.
__device__ __forceinline__ void nibbles(uint32_t word, bool high, float (&x)[4]) {
  const uint32_t bytes = (high ? word >> 4 : word) & 0x0f0f0f0fU;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = byte_to_float(bytes, i, 8.0F);
}

// The nearest integer, halves away from zero, clamped to [-max_code, max_code].
__device__ __forceinline__ float nearest_code(float x, float max_code) {
  return copysignf(truncf(fminf(fabsf(x) + 0.5F, max_code)), x);
}

// Eight consecutive numbers at an address aligned to their size, or to 16 bytes.
template <typename Code>
struct EightCodes;

template <>
struct EightCodes<int8_t> {
  uint2 words;

  __device__ __forceinline__ void load(const uint8_t* from) { words = *reinterpret_cast<const uint2*>(from); }
  __device__ __forceinline__ void four(int half, float (&x)[4]) const {
    widen_word<int8_t>(half == 0 ? words.x : words.y, x);
  }
};

template <>
struct EightCodes<float> {
  float4 quarters[2];

  __device__ __forceinline__ void load(const uint8_t* from) {
    quarters[0] = reinterpret_cast<const float4*>(from)[0];
    quarters[1] = reinterpret_cast<const float4*>(from)[1];
  }
  __device__ __forceinline__ void four(int half, float (&x)[4]) const {
    const float4 quarter = half == 0 ? quarters[0] : quarters[1];
    x[0] = quarter.x;
    x[1] = quarter.y;
    x[2] = quarter.z;
    x[3] = quarter.w;
  }
};

template <typename T>
struct EightSmallFloats {
  uint4 words;

  __device__ __forceinline__ void load(const uint8_t* from) { words = *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ void four(int half, float (&x)[4]) const {
    widen_word<T>(half == 0 ? words.x : words.z, x);
    widen_word<T>(half == 0 ? words.y : words.w, x + 2);
  }
};

template <>
struct EightCodes<__half> : EightSmallFloats<__half> {};
template <>
struct EightCodes<__nv_bfloat16> : EightSmallFloats<__nv_bfloat16> {};

}  // namespace tinyserve::cuda
