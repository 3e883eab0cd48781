// What csrc/cpu/simd.h offers, of one CPU target, behind plain functions: simd.h is compiled once per target
// (simd_subject.cpp) and lives in anonymous namespaces.
#pragma once

#include <cstdint>

namespace tinyserve::cpu::testing {

// 8 elements at a time for the vector functions: n is a multiple of 8.
struct SimdSubject {
  float (*half_to_float)(uint16_t bits);
  float (*bfloat16_to_float)(uint16_t bits);
  uint16_t (*half_from_float)(float x);
  uint16_t (*bfloat16_from_float)(float x);
  void (*load_halves)(const uint16_t* from, float* to, int64_t n);
  void (*load_bfloat16s)(const uint16_t* from, float* to, int64_t n);
  void (*load_bytes)(const int8_t* from, float* to, int64_t n);
  void (*load_first_halves)(const uint16_t* from, float* to, int64_t n);  // n < 8, to 8 floats
  void (*exp_nonpositive)(const float* from, float* to, int64_t n);
  float (*exp_nonpositive_scalar)(float x);
  float (*horizontal_sum)(const float* lanes);
};

}  // namespace tinyserve::cpu::testing

namespace tinyserve::cpu::scalar {
extern const testing::SimdSubject kSimdSubject;
}
namespace tinyserve::cpu::avx2 {
extern const testing::SimdSubject kSimdSubject;
}
namespace tinyserve::cpu::avx512 {
extern const testing::SimdSubject kSimdSubject;
}
namespace tinyserve::cpu::avx512vnni {
extern const testing::SimdSubject kSimdSubject;
}
namespace tinyserve::cpu::avx512bf16 {
extern const testing::SimdSubject kSimdSubject;
}
