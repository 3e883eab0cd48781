// Weighted sums of rows of int8 codes, exact, with 16-bit weights: what both the logits (rows are channels)
// and the weighted values (rows are tokens) of an int8 page come down to. Two ways: products of 16-bit pairs
// everywhere, and products of bytes where the CPU has them (AVX-512 VNNI).
#pragma once

#include "cpu/dot_pairs.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Where the tiles to come lie, so that each of their cache lines is asked for once.
struct NextLines {
  Ahead<int8_t> line;
  int64_t step;  // from one to the next
};

// The first n codes, zeros behind them: the memory after them may not exist.
inline I8x16 load_columns(const int8_t* p, int64_t n) {
  if (n >= 16) return load_codes(p);
  I8x16 codes = {};
  if (n == 8) {
    __builtin_memcpy(&codes, p, 8);
  } else {
    for (int64_t i = 0; i < n; ++i) codes[i] = p[i];
  }
  return codes;
}

// Both ways offer:
//   kRowsPerDot         rows are taken so many at a time
//   kLargestWeight      of a weight's code
//   RowWeights          16-bit codes, zeros behind the last, and what the way derives from them in prepare()
//   in_column_order     ends the order in which sum_rows leaves the columns
//   sum_rows            sums[g], over num_rows rows: weights[g].codes[first_row + row] * codes[row][column],
//                       for up to sixteen columns, of which num_columns exist; first_row is a multiple of
//                       kRowsPerDot

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

// A sum of four products of an unsigned and a signed byte, sixteen at once. Codes become unsigned by adding
// 128; weights are taken apart into two signed bytes, weight = 256 * high + low; what the 128s add is
// subtracted beforehand.

inline constexpr int64_t kRowsPerDot = 4;
// The largest weight of which both bytes are signed ones.
inline constexpr float kLargestWeight = 127 * 256 + 127;

typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint8_t U8x64 __attribute__((vector_size(64)));

template <int64_t kMaxWeights>
struct RowWeights {
  alignas(64) int16_t codes[kMaxWeights];
  alignas(64) int8_t high[kMaxWeights];
  alignas(64) int8_t low[kMaxWeights];
  int32_t high_start;  // minus what the 128s add
  int32_t low_start;

  // To be called when the first n codes are there; n is a multiple of eight.
  void prepare(int64_t n) {
    __m128i high_sum = _mm_setzero_si128(), low_sum = _mm_setzero_si128();
    for (int64_t i = 0; i < n; i += 8) {
      const __m128i code = _mm_load_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m128i high_part = _mm_srai_epi16(_mm_add_epi16(code, _mm_set1_epi16(128)), 8);
      const __m128i low_part = _mm_sub_epi16(code, _mm_slli_epi16(high_part, 8));
      high_sum = _mm_add_epi16(high_sum, high_part);
      low_sum = _mm_add_epi16(low_sum, low_part);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(high + i), _mm_cvtepi16_epi8(high_part));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(low + i), _mm_cvtepi16_epi8(low_part));
    }
    high_start = -128 * sum_lanes(high_sum);
    low_start = -128 * sum_lanes(low_sum);
  }

 private:
  // Sixteen bits are enough for the sums: a byte of every eighth weight.
  static_assert(kMaxWeights / 8 * 128 < INT16_MAX, "A lane's sum of bytes fits 16 bits.");
  static int32_t sum_lanes(__m128i x) {
    const __m128i pairs = _mm_madd_epi16(x, _mm_set1_epi16(1));
    const __m128i quads = _mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(quads, _mm_shuffle_epi32(quads, 0xb1)));
  }
};

// Four weights from memory, sixteen times.
inline __m512i splat_weights(const int8_t* p) {
  int32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return _mm512_set1_epi32(bytes);
}

// Sixteen columns of four rows, column by column.
inline __m512i interleave_rows(U8x64 rows) {
  constexpr U8x64 kOrder = {0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51,
                            4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
                            8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59,
                            12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  return _mm512_permutexvar_epi8(reinterpret_cast<__m512i>(kOrder), reinterpret_cast<__m512i>(rows));
}

template <int kHeads, typename Weights>
[[gnu::always_inline]] inline void sum_rows(const int8_t* codes, int64_t row_stride, int64_t first_row,
                                            int64_t num_rows, int64_t num_columns, const Weights* weights,
                                            NextLines next, F32x16* sums) {
  __m512i high[kHeads], low[kHeads];
  for (int g = 0; g < kHeads; ++g) {
    high[g] = _mm512_set1_epi32(weights[g].high_start);
    low[g] = _mm512_set1_epi32(weights[g].low_start);
  }
  const bool contiguous = row_stride == 16;
  for (int64_t row = 0; row < num_rows; row += kRowsPerDot, codes += kRowsPerDot * row_stride) {
    prefetch(next.line);
    next.line += next.step;
    U8x64 rows;
    if (num_columns < 16 || row + kRowsPerDot > num_rows) {
      I8x16 row_codes[kRowsPerDot] = {};
      for (int64_t i = 0; i < kRowsPerDot && row + i < num_rows; ++i) {
        row_codes[i] = load_columns(codes + i * row_stride, num_columns);
      }
      __builtin_memcpy(&rows, row_codes, sizeof(rows));
    } else if (contiguous) {
      __builtin_memcpy(&rows, codes, sizeof(rows));
    } else {
      __m512i quarters = _mm512_castsi128_si512(reinterpret_cast<__m128i>(load_codes(codes)));
      quarters = _mm512_inserti32x4(quarters, reinterpret_cast<__m128i>(load_codes(codes + row_stride)), 1);
      quarters =
          _mm512_inserti32x4(quarters, reinterpret_cast<__m128i>(load_codes(codes + 2 * row_stride)), 2);
      quarters =
          _mm512_inserti32x4(quarters, reinterpret_cast<__m128i>(load_codes(codes + 3 * row_stride)), 3);
      rows = reinterpret_cast<U8x64>(quarters);
    }
    const __m512i columns = interleave_rows(rows ^ uint8_t{128});
    for (int g = 0; g < kHeads; ++g) {
      high[g] = _mm512_dpbusd_epi32(high[g], columns, splat_weights(weights[g].high + first_row + row));
      low[g] = _mm512_dpbusd_epi32(low[g], columns, splat_weights(weights[g].low + first_row + row));
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[g], 8), low[g]);
    sums[g] = reinterpret_cast<F32x16>(_mm512_cvtepi32_ps(sum));
  }
}

inline constexpr bool kColumnsInOrder = true;
inline F32x16 in_column_order(F32x16 sum) { return sum; }

#else

inline constexpr int64_t kRowsPerDot = 2;
inline constexpr float kLargestWeight = 32767;

template <int64_t kMaxWeights>
struct RowWeights {
  alignas(64) int16_t codes[kMaxWeights];

  void prepare(int64_t) {}
};

template <int kHeads, typename Weights>
[[gnu::always_inline]] inline void sum_rows(const int8_t* codes, int64_t row_stride, int64_t first_row,
                                            int64_t num_rows, int64_t num_columns, const Weights* weights,
                                            NextLines next, F32x16* sums) {
  I32x8 even[kHeads], odd[kHeads];
  for (int g = 0; g < kHeads; ++g) even[g] = odd[g] = I32x8{};
  const auto add_pair = [&](I16x16 a, I16x16 b, int64_t row) __attribute__((always_inline)) {
    const RowPairs pairs = interleave(a, b);
    for (int g = 0; g < kHeads; ++g) {
      const I16x16 weight = splat_pair(weights[g].codes + first_row + row);
      even[g] = add_dot_pairs(even[g], pairs.even, weight);
      odd[g] = add_dot_pairs(odd[g], pairs.odd, weight);
    }
  };
  int64_t row = 0;
  if (num_columns >= kWideLanes) {
#pragma GCC unroll 1  // unrolled, the sums would be added up in another order, which takes too many registers
    for (; row + 2 <= num_rows; row += 2) {
      prefetch(next.line);
      next.line += next.step;
      add_pair(load_wide(codes), load_wide(codes + row_stride), row);
      codes += 2 * row_stride;
    }
  }
  for (; row < num_rows; row += 2, codes += 2 * row_stride) {
    const I8x16 second = row + 1 < num_rows ? load_columns(codes + row_stride, num_columns) : I8x16{};
    add_pair(widen(load_columns(codes, num_columns)), widen(second), row);
  }
  for (int g = 0; g < kHeads; ++g) {
    sums[g] = join(__builtin_convertvector(even[g], F32x8), __builtin_convertvector(odd[g], F32x8));
  }
}

inline constexpr bool kColumnsInOrder = false;
inline F32x16 in_column_order(F32x16 sum) { return restore_columns(low_half(sum), high_half(sum)); }

#endif

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
