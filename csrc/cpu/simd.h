// Eight fp32 lanes over GCC/Clang vector extensions: the same source serves every CPU target.
// Everything lives in the target's own namespace and an anonymous one: an inline function shared
// between targets could be merged by the linker into the copy compiled for the widest instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/element_type.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr int kLanes = 8;

typedef float F32x8 __attribute__((vector_size(32)));
typedef int32_t I32x8 __attribute__((vector_size(32)));
typedef uint32_t U32x8 __attribute__((vector_size(32)));

inline constexpr float kLargestFloat = 3.40282347e+38F;

inline F32x8 splat(float x) { return F32x8{x, x, x, x, x, x, x, x}; }

inline float bits_to_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

// --- scalar conversions, exact; to 16 bits they round to nearest even ------------------------------

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return static_cast<float>(x); }
inline float to_float(core::BFloat16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(core::Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000U) << 16;
  const uint32_t magnitude = x.bits & 0x7fffU;
  if (magnitude >= 0x7c00U) return bits_to_float(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  if (magnitude >= 0x400U) return bits_to_float(sign | ((magnitude << 13) + 0x38000000U));
  return bits_to_float(sign | float_to_bits(static_cast<float>(magnitude) * 0x1p-24F));
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, core::BFloat16& out) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    out.bits = static_cast<uint16_t>((bits >> 16) | 0x40U);  // keep a NaN a NaN
  } else {
    out.bits = static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
  }
}
inline void from_float(float x, core::Half& out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  uint32_t half;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U;
  } else if (magnitude >= 0x477ff000U) {  // rounds to 65536 or more
    half = 0x7c00U;
  } else if (magnitude >= 0x38800000U) {
    const uint32_t rebased = magnitude - 0x38000000U;
    half = (rebased + 0xfffU + ((rebased >> 13) & 1U)) >> 13;
  } else {  // subnormal: adding 0.5 leaves the rounded value in the low mantissa bits
    half = float_to_bits(bits_to_float(magnitude) + 0.5F) - 0x3f000000U;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

// --- eight elements, widened to fp32 ---------------------------------------------------------------

inline F32x8 load(const float* p) {
  F32x8 x;
  __builtin_memcpy(&x, p, 32);
  return x;
}
inline void store(float* p, F32x8 x) { __builtin_memcpy(p, &x, 32); }

inline F32x8 load(const core::BFloat16* p) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<F32x8>(_mm256_slli_epi32(wide, 16));
#else
  U32x8 bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint32_t>(p[i].bits) << 16;
  return reinterpret_cast<F32x8>(bits);
#endif
}
inline F32x8 load(const core::Half* p) {
#if defined(__F16C__)
  return reinterpret_cast<F32x8>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  F32x8 x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(p[i]);
  return x;
#endif
}
inline F32x8 load(const int8_t* p) {
#if defined(__AVX2__)
  const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<F32x8>(_mm256_cvtepi32_ps(wide));
#else
  F32x8 x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(p[i]);
  return x;
#endif
}

// --- sixteen elements at once ----------------------------------------------------------------------

// Whether sixteen lanes are one register, of 32; elsewhere they are two or more, of 16.
#if defined(__AVX512F__)
inline constexpr bool kWideRegisters = true;

typedef float F32x16 __attribute__((vector_size(64)));

inline F32x16 splat16(float x) { return reinterpret_cast<F32x16>(_mm512_set1_ps(x)); }
inline F32x16 join(F32x8 low, F32x8 high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline F32x8 low_half(F32x16 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
inline F32x8 high_half(F32x16 x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
#else
inline constexpr bool kWideRegisters = false;

struct F32x16 {
  F32x8 low;
  F32x8 high;

  F32x16& operator+=(F32x16 x) {
    low += x.low;
    high += x.high;
    return *this;
  }
  friend F32x16 operator*(F32x16 a, F32x16 b) { return {a.low * b.low, a.high * b.high}; }
};

inline F32x16 splat16(float x) { return {splat(x), splat(x)}; }
inline F32x16 join(F32x8 low, F32x8 high) { return {low, high}; }
inline F32x8 low_half(F32x16 x) { return x.low; }
inline F32x8 high_half(F32x16 x) { return x.high; }
#endif

inline void store(float* p, F32x16 x) {
  store(p, low_half(x));
  store(p + kLanes, high_half(x));
}

// Widening sixteen bf16 takes one load, a shift and a mask when the even elements go to one vector of eight
// and the odd ones to the other. Loops that treat all elements alike run in this lane order; restore_order()
// ends it. Where all sixteen fit one vector, they are widened in order.
#if defined(__AVX512F__)
template <typename T>
inline constexpr bool kEvenOddLanes = false;
#else
template <typename T>
inline constexpr bool kEvenOddLanes = std::is_same_v<T, core::BFloat16>;
#endif

template <typename T>
inline F32x16 load16(const T* p) {
  if constexpr (kEvenOddLanes<T>) {
    U32x8 pairs;
    __builtin_memcpy(&pairs, p, 32);
    return join(reinterpret_cast<F32x8>(pairs << 16), reinterpret_cast<F32x8>(pairs & 0xffff0000U));
  } else {
    return join(load(p), load(p + kLanes));
  }
}
#if defined(__AVX512F__)
inline F32x16 load16(const float* p) { return reinterpret_cast<F32x16>(_mm512_loadu_ps(p)); }
inline F32x16 load16(const core::Half* p) {
  return reinterpret_cast<F32x16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline F32x16 load16(const core::BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return reinterpret_cast<F32x16>(_mm512_slli_epi32(wide, 16));
}
inline F32x16 load16(const int8_t* p) {
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<F32x16>(_mm512_cvtepi32_ps(wide));
}
#endif

template <typename T>
inline F32x16 load16_in_order(const T* p) {
  if constexpr (kEvenOddLanes<T>) {
    return join(load(p), load(p + kLanes));
  } else {
    return load16(p);
  }
}

template <typename T>
inline F32x16 restore_order(F32x16 x) {
  if constexpr (!kEvenOddLanes<T>) return x;
  const F32x8 even = low_half(x), odd = high_half(x);
  return join(__builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11),
              __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
}

// The first n < 8 elements, zero behind them: the memory after them may not exist.
template <typename T>
inline F32x8 load_first(const T* p, int64_t n) {
  F32x8 x = splat(0.0F);
  for (int64_t i = 0; i < n; ++i) x[i] = to_float(p[i]);
  return x;
}

inline float horizontal_sum(F32x8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// NaN lanes behind the first lose.
inline float horizontal_maximum(F32x8 x) {
  float maximum = x[0];
  for (int i = 1; i < kLanes; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

inline F32x8 select(I32x8 mask, F32x8 yes, F32x8 no) {
  return reinterpret_cast<F32x8>((mask & reinterpret_cast<I32x8>(yes)) |
                                 (~mask & reinterpret_cast<I32x8>(no)));
}

// Bit i is set where lane i of a comparison holds.
inline uint32_t lane_mask(I32x8 mask) {
#if defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= (static_cast<uint32_t>(mask[i]) >> 31) << i;
  return bits;
#endif
}

// exp(x) for x <= 0, relative error below 2e-6; 0 below the smallest normal result, NaN stays NaN.
// Range reduction x = n ln2 + r by adding 1.5 * 2^23, then a degree-6 polynomial on |r| <= ln2 / 2.
inline F32x8 exp_nonpositive(F32x8 x) {
  const I32x8 underflow = x < splat(-87.0F);
  const F32x8 safe = select(underflow, splat(0.0F), x);
  const F32x8 shifted = safe * splat(1.44269504F) + splat(12582912.0F);
  const F32x8 n = shifted - splat(12582912.0F);
  F32x8 r = safe - n * splat(0.693359375F);
  r = r - n * splat(-2.12194440e-4F);
  F32x8 p = splat(1.0F / 720.0F);
  p = p * r + splat(1.0F / 120.0F);
  p = p * r + splat(1.0F / 24.0F);
  p = p * r + splat(1.0F / 6.0F);
  p = p * r + splat(0.5F);
  p = p * r + splat(1.0F);
  p = p * r + splat(1.0F);
  const I32x8 exponent = (reinterpret_cast<I32x8>(shifted) - reinterpret_cast<I32x8>(splat(12582912.0F)))
                         << 23;
  const F32x8 scaled = reinterpret_cast<F32x8>(reinterpret_cast<I32x8>(p) + exponent);
  const F32x8 result = select(x != x, x, scaled);
  return select(underflow, splat(0.0F), result);
}

inline float exp_nonpositive(float x) { return exp_nonpositive(splat(x))[0]; }

// Calls f with a null pointer of the element type, so that it can be a template on that type. Queries,
// results and new keys are floating point; pages may be int8 too.
template <typename F>
inline void dispatch_element(core::ElementType type, const F& f) {
  switch (type) {
    case core::ElementType::kFloat16:
      return f(static_cast<core::Half*>(nullptr));
    case core::ElementType::kBFloat16:
      return f(static_cast<core::BFloat16*>(nullptr));
    case core::ElementType::kFloat32:
    case core::ElementType::kInt8:
      break;
  }
  return f(static_cast<float*>(nullptr));
}

template <typename F>
inline void dispatch_page_element(core::ElementType type, const F& f) {
  if (type == core::ElementType::kInt8) return f(static_cast<int8_t*>(nullptr));
  dispatch_element(type, f);
}

template <typename T>
inline void load_row(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(from + i));
}

// Widens n elements (a multiple of 8) of a tensor row to fp32.
inline void load_row(const void* from, core::ElementType type, int64_t offset, int64_t n, float* to) {
  dispatch_element(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    load_row(static_cast<const T*>(from) + offset, n, to);
  });
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
