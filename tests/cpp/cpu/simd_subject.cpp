// Built once per CPU target with that target's flags, as the kernels are.
#include "simd_subject.h"

#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {

const testing::SimdSubject kSimdSubject = {
    .half_to_float = [](uint16_t bits) { return to_float(core::Half{bits}); },
    .bfloat16_to_float = [](uint16_t bits) { return to_float(core::BFloat16{bits}); },
    .half_from_float =
        [](float x) {
          core::Half out;
          from_float(x, out);
          return out.bits;
        },
    .bfloat16_from_float =
        [](float x) {
          core::BFloat16 out;
          from_float(x, out);
          return out.bits;
        },
    .load_halves = [](const uint16_t* from, float* to,
                      int64_t n) { load_row(from, core::ElementType::kFloat16, 0, n, to); },
    .load_bfloat16s = [](const uint16_t* from, float* to,
                         int64_t n) { load_row(from, core::ElementType::kBFloat16, 0, n, to); },
    .load_bytes =
        [](const int8_t* from, float* to, int64_t n) {
          for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(from + i));
        },
    .load_first_halves =
        [](const uint16_t* from, float* to, int64_t n) {
          store(to, load_first(reinterpret_cast<const core::Half*>(from), n));
        },
    .exp_nonpositive =
        [](const float* from, float* to, int64_t n) {
          for (int64_t i = 0; i < n; i += kLanes) store(to + i, exp_nonpositive(load(from + i)));
        },
    .exp_nonpositive_scalar = [](float x) { return exp_nonpositive(x); },
    .horizontal_sum = [](const float* lanes) { return horizontal_sum(load(lanes)); },
};

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
