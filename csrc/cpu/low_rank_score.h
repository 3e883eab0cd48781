// Scores of low-rank summaries: the logits of a page's tokens, for up to four query heads at once, from one
// dot product with the mean and one per rank; then their log-sum-exp or maximum.
//
// Queries are rounded to 16-bit integers, so that the dot products with codes are exact integer sums: an
// error of 2^-16 of the largest channel, small beside that of the codes, for half the instructions. Logits
// are held in units of ln 2, which makes the exponential cheaper. Codes are used as they are stored, plus 8:
// what the 8s add to a dot product is known beforehand (basis) or the same for all tokens of a page
// (coefficients).
#pragma once

#include "core/limits.h"
#include "core/params.h"
#include "cpu/int4.h"
#include "cpu/lanes_of_heads.h"
#include "cpu/log_exp.h"
#include "cpu/simd.h"
#include "cpu/summary_rows.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr float kNoLogit = -__builtin_inff();
inline constexpr float kMaxQueryCode = 32767.0F;
inline constexpr I32x8 kFirstLanes = {0, 1, 2, 3, 4, 5, 6, 7};

// The queries of a head block: q = scale * code. `basis_order` has the codes of two int4 blocks as their
// bytes hold them: the low halves of both, then the high halves. Zeros behind the last channel of both.
struct LowRankQueries {
  alignas(64) int16_t in_order[kScoreHeads][core::kMaxHeadDim];
  alignas(64) int16_t basis_order[kScoreHeads][core::kMaxHeadDim];
  alignas(16) int32_t offset[kScoreHeads];  // what the 8s add to a dot product with a basis vector
  alignas(16) float scale[kScoreHeads];  // with the softmax scale, over ln 2; NaN if the query is not finite
};

inline int64_t basis_position(int64_t d) {
  const int64_t within = d % (2 * core::kInt4Block);
  return d - within + (within & 7) + (within & 8) * 2 + (within & 16) / 2;
}

inline void load_low_rank_query(const core::PackedView& from, int64_t row, int64_t query_head,
                                int64_t head_dim, float sm_scale, int64_t h, LowRankQueries& queries) {
  float q[core::kMaxHeadDim];
  load_row(from.data, from.type, row * from.token_stride + query_head * from.head_stride, head_dim, q);
  float largest = 0.0F;
  bool finite = true;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float magnitude = __builtin_fabsf(q[d]);
    largest = magnitude > largest ? magnitude : largest;
    finite = finite && magnitude <= kLargestFloat;  // false for NaN
  }
  float inverse = finite && largest > 0.0F ? kMaxQueryCode / largest : 0.0F;
  if (inverse == __builtin_inff()) inverse = 0.0F;  // a query this small is no query
  const float scale = finite ? largest / kMaxQueryCode : __builtin_nanf("");
  queries.scale[h] = scale * (sm_scale * kLog2OfE);
  queries.offset[h] = 0;
  __builtin_memset(queries.in_order[h], 0, sizeof(queries.in_order[h]));
  __builtin_memset(queries.basis_order[h], 0, sizeof(queries.basis_order[h]));
  if (!finite) return;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float x = q[d] * inverse;
    const auto code = static_cast<int16_t>(x + (x < 0.0F ? -0.5F : 0.5F));
    queries.in_order[h][d] = code;
    queries.basis_order[h][basis_position(d)] = code;
    queries.offset[h] += kInt4Offset * code;
  }
}

// Lane h: head h's dot product with the mean's codes.
template <int kHeads>
inline F32x4 dot_mean(const LowRankQueries& queries, const int8_t* codes, int64_t head_dim) {
  I32x8 sum[kHeads] = {};
  // The last 16 codes may be basis bytes in part, where the query is 0.
  for (int64_t d = 0; d < head_dim; d += kWideLanes) {
    const I16x16 mean = load_wide(codes + d);
    for (int h = 0; h < kHeads; ++h) sum[h] = add_dot_pairs(sum[h], mean, load_wide(queries.in_order[h] + d));
  }
  return __builtin_convertvector(sum_heads<kHeads>(sum), F32x4);
}

// dots[v]: lane h is head h's dot product with basis vector v of kVectors.
template <int kHeads, int kVectors>
inline void dot_basis(const LowRankQueries& queries, const uint8_t* basis, int64_t basis_bytes, F32x4* dots) {
  I32x8 sum[kVectors][kHeads] = {};
  // Behind an odd last block follow bytes of the row where the query is 0.
  for (int64_t byte = 0; byte < basis_bytes; byte += kWideLanes) {
    for (int v = 0; v < kVectors; ++v) {
      const U16x16 bytes = load_wide(basis + v * basis_bytes + byte);
      const I16x16 low = reinterpret_cast<I16x16>(bytes & 15);
      const I16x16 high = reinterpret_cast<I16x16>(bytes >> 4);
      for (int h = 0; h < kHeads; ++h) {
        const int16_t* q = queries.basis_order[h] + 2 * byte;
        sum[v][h] =
            add_dot_pairs(add_dot_pairs(sum[v][h], low, load_wide(q)), high, load_wide(q + kWideLanes));
      }
    }
  }
  I32x4 offset;
  __builtin_memcpy(&offset, queries.offset, 16);
  for (int v = 0; v < kVectors; ++v) {
    dots[v] = __builtin_convertvector(sum_heads<kHeads>(sum[v]) - offset, F32x4);
  }
}

// What the logits of a page are made of, for each head: logit[t] = shift + sum over ranks of along * stored
// coefficient.
struct PageLogits {
  alignas(16) float shift[kScoreHeads];
  alignas(16) float along[core::kMaxRank][kScoreHeads];
  alignas(16) float largest[kScoreHeads];                  // of `logits`; 0 where all are -inf
  F32x8 logits[core::kMaxPageSize / kLanes][kScoreHeads];  // without the shift
};

template <int kHeads, int kRank>
inline void read_sketch(const LowRankQueries& queries, const uint8_t* summary, int any_rank, int64_t head_dim,
                        const core::LowRankLayout& layout, PageLogits& logits) {
  const int rank = kRank == 0 ? any_rank : kRank;
  F32x4 dots[core::kMaxRank];
  int r = 0;
  for (; r + 2 <= rank; r += 2) {
    dot_basis<kHeads, 2>(queries, summary + layout.basis + r * layout.basis_bytes, layout.basis_bytes,
                         dots + r);
  }
  if (r < rank) {
    dot_basis<kHeads, 1>(queries, summary + layout.basis + r * layout.basis_bytes, layout.basis_bytes,
                         dots + r);
  }
  core::BFloat16 scales[1 + core::kMaxRank];
  __builtin_memcpy(scales, summary + layout.scales, static_cast<size_t>(1 + rank) * sizeof(scales[0]));
  const F32x4 unit = load4(queries.scale);
  // Products of codes first, scales later: a scale near the largest float times a code may overflow.
  F32x4 shift = splat4(to_float(scales[0])) *
                (unit * dot_mean<kHeads>(queries, reinterpret_cast<const int8_t*>(summary), head_dim));
  for (int i = 0; i < rank; ++i) {
    const F32x4 along = splat4(to_float(scales[1 + i])) * (unit * dots[i]);
    store4(logits.along[i], along);
    shift -= splat4(kInt4Offset) * along;
  }
  store4(logits.shift, shift);
}

// The logits of a page's tokens and their largest one, which goes to `max` [kScoreHeads] with the shift.
template <int kHeads, int kRank>
inline void find_logits(const uint8_t* coefficients, int any_rank, int64_t coefficient_bytes,
                        int64_t page_size, PageLogits& page, float* max) {
  const int rank = kRank == 0 ? any_rank : kRank;
  F32x8 maxima[kHeads];
  for (int h = 0; h < kHeads; ++h) maxima[h] = splat(kNoLogit);
  for (int64_t t = 0; t < page_size; t += core::kInt4Block) {
    F32x8 first[kHeads], last[kHeads];
    for (int h = 0; h < kHeads; ++h) first[h] = last[h] = splat(0.0F);
    for (int r = 0; r < rank; ++r) {
      const Int4Block codes = load_int4(coefficients + r * coefficient_bytes + t / 2);
      for (int h = 0; h < kHeads; ++h) {
        const F32x8 along = splat(page.along[r][h]);
        first[h] += along * codes.first;
        last[h] += along * codes.last;
      }
    }
    if (t + core::kInt4Block > page_size) {  // the block's last codes are no tokens
      const I32x8 slot = kFirstLanes + static_cast<int32_t>(t);
      const auto end = static_cast<int32_t>(page_size);
      for (int h = 0; h < kHeads; ++h) {
        first[h] = select(slot < end, first[h], splat(kNoLogit));
        last[h] = select(slot + kLanes < end, last[h], splat(kNoLogit));
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      page.logits[t / kLanes][h] = first[h];
      page.logits[t / kLanes + 1][h] = last[h];
      const F32x8 larger = first[h] > last[h] ? first[h] : last[h];
      maxima[h] = larger > maxima[h] ? larger : maxima[h];
    }
  }
  const F32x4 largest = max_heads<kHeads>(maxima);
  store4(max, load4(page.shift) + largest);
  // Logits that are all -inf are taken relative to 0: -inf less -inf would be NaN.
  store4(page.largest, select4(largest == splat4(kNoLogit), splat4(0.0F), largest));
}

// sum [kScoreHeads]: of 2^(logit - largest) over the tokens.
template <int kHeads>
inline void sum_exponentials(const PageLogits& page, int64_t page_size, float* sum) {
  F32x8 sums[kHeads];
  for (int h = 0; h < kHeads; ++h) sums[h] = splat(0.0F);
  for (int64_t v = 0; v < (page_size + kLanes - 1) / kLanes; ++v) {
    for (int h = 0; h < kHeads; ++h) {
      sums[h] += exp2_nonpositive(page.logits[v][h] - splat(page.largest[h]));
    }
  }
  store4(sum, sum_heads<kHeads>(sums));
}

// kRank: 0 for any. maxima, sums: [num_pages, kScoreHeads]; a page's score is ln 2 * maximum +
// log(sum), or without the logarithm for TokenReduction::kMax, which has no sums.
template <int kHeads, int kRank>
inline void score_sketches(const SummaryBlock& block, const core::Scorer& scorer,
                           const LowRankQueries& queries, int64_t head_dim, int64_t page_size, float* maxima,
                           float* sums) {
  const core::LowRankLayout layout = scorer.low_rank_layout(head_dim, page_size);
  const int rank = kRank == 0 ? scorer.rank : kRank;
  // In three passes over the pages: each step is a long chain of dependent operations for one page, which
  // another page's chain can only overlap if it comes soon.
  PageLogits pages[kScoreBlockPages];
  block.for_each([&](const uint8_t* summary, int64_t page) {
    read_sketch<kHeads, kRank>(queries, summary, rank, head_dim, layout, pages[page]);
  });
  for (int64_t page = 0; page < block.num_pages; ++page) {
    find_logits<kHeads, kRank>(block.row(page) + layout.coefficients, rank, layout.coefficient_bytes,
                               page_size, pages[page], maxima + page * kScoreHeads);
  }
  if (scorer.token_reduction != core::TokenReduction::kLogSumExp) return;
  for (int64_t page = 0; page < block.num_pages; ++page) {
    sum_exponentials<kHeads>(pages[page], page_size, sums + page * kScoreHeads);
  }
}

// scores: [num_pages rounded up to even, kScoreHeads]
template <int kHeads>
inline void score_low_rank(const SummaryBlock& block, const core::Scorer& scorer,
                           const LowRankQueries& queries, int64_t head_dim, int64_t page_size,
                           float* scores) {
  alignas(64) float sums[kScoreBlockPages * kScoreHeads];
  const int64_t last = block.num_pages - 1 + block.num_pages % 2;  // two pages a vector
  store4(scores + last * kScoreHeads, splat4(0.0F));
  store4(sums + last * kScoreHeads, splat4(1.0F));
  switch (scorer.rank) {
    case 1:
      score_sketches<kHeads, 1>(block, scorer, queries, head_dim, page_size, scores, sums);
      break;
    case 2:
      score_sketches<kHeads, 2>(block, scorer, queries, head_dim, page_size, scores, sums);
      break;
    case 4:
      score_sketches<kHeads, 4>(block, scorer, queries, head_dim, page_size, scores, sums);
      break;
    case 8:
      score_sketches<kHeads, 8>(block, scorer, queries, head_dim, page_size, scores, sums);
      break;
    default:
      score_sketches<kHeads, 0>(block, scorer, queries, head_dim, page_size, scores, sums);
      break;
  }
  const bool log_sum_exp = scorer.token_reduction == core::TokenReduction::kLogSumExp;
  const F32x8 infinity = splat(__builtin_inff());
  for (int64_t i = 0; i < block.num_pages * kScoreHeads; i += kLanes) {
    const F32x8 max = splat(kLn2) * load(scores + i);
    F32x8 score = max;
    if (log_sum_exp) score = select(max == infinity, max, max + log_positive(load(sums + i)));
    store(scores + i, score);
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
