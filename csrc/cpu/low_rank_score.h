// Scores of low-rank summaries: the logits of a page's tokens, for up to four query heads at once, from one
// dot product with the mean and one per rank; then their log-sum-exp or maximum.
//
// Logits are held in units of ln 2, which makes the exponential cheaper, and codes are used as they are
// stored, plus 8: what the 8s add to a dot product is known beforehand (basis) or the same for all tokens of
// a page (coefficients), and is taken off in one go.
#pragma once

#include "core/limits.h"
#include "core/params.h"
#include "cpu/int4.h"
#include "cpu/lanes_of_heads.h"
#include "cpu/log_exp.h"
#include "cpu/simd.h"
#include "cpu/summary_chunk.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr float kNoLogit = -__builtin_inff();

// The queries of a head block over ln 2, scaled, zeros up to a whole int4 block.
struct LowRankQueries {
  alignas(64) float q[kScoreHeads][core::kMaxHeadDim];
  F32x8 offset[kScoreHeads];  // takes the 8s off, lane by lane
};

inline void load_low_rank_query(const core::PackedView& from, int64_t row, int64_t query_head,
                                int64_t head_dim, float sm_scale, int64_t h, LowRankQueries& queries) {
  float* q = queries.q[h];
  load_row(from.data, from.type, row * from.token_stride + query_head * from.head_stride, head_dim, q);
  if (head_dim % core::kInt4Block != 0) store(q + head_dim, splat(0.0F));
  const F32x8 scale = splat(sm_scale * kLog2OfE);
  F32x8 sum = splat(0.0F);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const F32x8 scaled = scale * load(q + d);
    store(q + d, scaled);
    sum += scaled;
  }
  queries.offset[h] = splat(-kInt4Offset) * sum;
}

// dots[v]: lane h is the dot product of head h with the mean (v = 0, with kMean) and with kBasis basis
// vectors.
template <int kHeads, bool kMean, int kBasis>
inline void dot_codes(const LowRankQueries& queries, const int8_t* mean, const uint8_t* basis,
                      int64_t basis_bytes, F32x4* dots) {
  constexpr int kFirst = kMean ? 1 : 0;
  constexpr int kVectors = kFirst + kBasis;
  // Few heads give few independent sums, too few to hide the latency of a multiply-add.
  constexpr int kDepth = kHeads * kVectors <= 6 ? 2 : 1;
  F32x8 sum[kDepth][kVectors][kHeads];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) {
      sum[0][v][h] = v < kFirst ? splat(0.0F) : queries.offset[h];
      if (kDepth == 2) sum[kDepth - 1][v][h] = splat(0.0F);
    }
  }
  const float* q = queries.q[0];
  for (int64_t byte = 0; byte < basis_bytes; byte += core::kInt4BlockBytes) {
    for (int half = 0; half < 2; ++half, q += kLanes) {
      F32x8 codes[kVectors];
      if (kMean) {
        codes[0] = load(mean);  // the last block's second half may be basis bytes, where q is 0
        mean += kLanes;
      }
      for (int v = 0; v < kBasis; ++v) {
        const uint8_t* block = basis + v * basis_bytes + byte;
        codes[kFirst + v] = half == 0 ? load_low_codes(block) : load_high_codes(block);
      }
      for (int h = 0; h < kHeads; ++h) {
        const F32x8 query = load(q + h * core::kMaxHeadDim);
        for (int v = 0; v < kVectors; ++v) sum[half % kDepth][v][h] += query * codes[v];
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    if (kDepth == 2) {
      for (int h = 0; h < kHeads; ++h) sum[0][v][h] += sum[kDepth - 1][v][h];
    }
    dots[v] = sum_heads<kHeads>(sum[0][v]);
  }
}

// The dot products with the mean and every basis vector, as many at a time as registers hold sums.
template <int kHeads, int kRank>
inline void dot_summary(const LowRankQueries& queries, const uint8_t* summary, int rank,
                        const core::LowRankLayout& layout, F32x4* dots) {
  const auto* mean = reinterpret_cast<const int8_t*>(summary);
  const uint8_t* basis = summary + layout.basis;
  const int64_t bytes = layout.basis_bytes;
  if constexpr (kRank == 1) {
    dot_codes<kHeads, true, 1>(queries, mean, basis, bytes, dots);
  } else {
    dot_codes<kHeads, true, 2>(queries, mean, basis, bytes, dots);
    if constexpr (kRank == 0) {
      int done = 2;
      for (; done + 2 <= rank; done += 2) {
        dot_codes<kHeads, false, 2>(queries, nullptr, basis + done * bytes, bytes, dots + 1 + done);
      }
      if (done < rank) {
        dot_codes<kHeads, false, 1>(queries, nullptr, basis + done * bytes, bytes, dots + 1 + done);
      }
    }
  }
}

// kRank: 1, 2, or 0 for any rank from 3. maxima, sums: [num_pages, kScoreHeads]; a page's score is ln 2 *
// maximum + log(sum), or without the logarithm for TokenReduction::kMax, which has no sums.
template <int kHeads, int kRank>
inline void score_sketches(const SummaryChunk& chunk, const core::Scorer& scorer,
                           const LowRankQueries& queries, int64_t head_dim, int64_t page_size, float* maxima,
                           float* sums) {
  const core::LowRankLayout layout = scorer.low_rank_layout(head_dim, page_size);
  const int rank = kRank == 0 ? scorer.rank : kRank;
  const bool log_sum_exp = scorer.token_reduction == core::TokenReduction::kLogSumExp;
  const int64_t num_vectors = (page_size + kLanes - 1) / kLanes;
  // Lanes of the last vector that are tokens.
  I32x8 tail;
  for (int i = 0; i < kLanes; ++i) tail[i] = (num_vectors - 1) * kLanes + i < page_size ? -1 : 0;

  for_each_summary(chunk, [&](const uint8_t* summary, int64_t page) {
    F32x4 dots[1 + core::kMaxRank];
    dot_summary<kHeads, kRank>(queries, summary, rank, layout, dots);
    core::BFloat16 scales[1 + core::kMaxRank];
    __builtin_memcpy(scales, summary + layout.scales, static_cast<size_t>(1 + rank) * sizeof(scales[0]));
    F32x4 shift = dots[0] * splat4(to_float(scales[0]));  // of all logits of the page
    alignas(16) float along[core::kMaxRank][kScoreHeads];
    for (int r = 0; r < rank; ++r) {
      const F32x4 scaled = dots[1 + r] * splat4(to_float(scales[1 + r]));
      store4(along[r], scaled);
      shift -= splat4(kInt4Offset) * scaled;
    }

    alignas(64) float logits[kHeads][core::kMaxPageSize];
    F32x8 max[kHeads];
    for (int h = 0; h < kHeads; ++h) max[h] = splat(kNoLogit);
    for (int64_t v = 0; v < num_vectors; ++v) {
      F32x8 logit[kHeads];
      for (int h = 0; h < kHeads; ++h) logit[h] = splat(0.0F);
      for (int r = 0; r < rank; ++r) {
        const uint8_t* block =
            summary + layout.coefficients + r * layout.coefficient_bytes + v / 2 * core::kInt4BlockBytes;
        const F32x8 code = v % 2 == 0 ? load_low_codes(block) : load_high_codes(block);
        for (int h = 0; h < kHeads; ++h) logit[h] += splat(along[r][h]) * code;
      }
      for (int h = 0; h < kHeads; ++h) {
        if (v + 1 == num_vectors) logit[h] = select(tail, logit[h], splat(kNoLogit));
        store(logits[h] + v * kLanes, logit[h]);
        max[h] = logit[h] > max[h] ? logit[h] : max[h];
      }
    }
    const F32x4 page_max = max_heads<kHeads>(max);
    store4(maxima + page * kScoreHeads, shift + page_max);
    if (!log_sum_exp) return;

    // Where every logit is -inf or NaN they are kept apart from each other by a shift of 0.
    alignas(16) float finite_max[kScoreHeads];
    store4(finite_max, select4(page_max == splat4(kNoLogit), splat4(0.0F), page_max));
    F32x8 sum[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      sum[h] = splat(0.0F);
      for (int64_t v = 0; v < num_vectors; ++v) {
        sum[h] += exp2_nonpositive(load(logits[h] + v * kLanes) - splat(finite_max[h]));
      }
    }
    store4(sums + page * kScoreHeads, sum_heads<kHeads>(sum));
  });
}

// scores: [num_pages rounded up to even, kScoreHeads]
template <int kHeads>
inline void score_low_rank(const SummaryChunk& chunk, const core::Scorer& scorer,
                           const LowRankQueries& queries, int64_t head_dim, int64_t page_size,
                           float* scores) {
  alignas(64) float sums[core::kScoreChunkPages * kScoreHeads];
  const int64_t last = chunk.num_pages - 1 + chunk.num_pages % 2;  // two pages a vector
  store4(scores + last * kScoreHeads, splat4(0.0F));
  store4(sums + last * kScoreHeads, splat4(1.0F));
  switch (scorer.rank) {
    case 1:
      score_sketches<kHeads, 1>(chunk, scorer, queries, head_dim, page_size, scores, sums);
      break;
    case 2:
      score_sketches<kHeads, 2>(chunk, scorer, queries, head_dim, page_size, scores, sums);
      break;
    default:
      score_sketches<kHeads, 0>(chunk, scorer, queries, head_dim, page_size, scores, sums);
      break;
  }
  const bool log_sum_exp = scorer.token_reduction == core::TokenReduction::kLogSumExp;
  const F32x8 infinity = splat(__builtin_inff());
  for (int64_t i = 0; i < chunk.num_pages * kScoreHeads; i += kLanes) {
    const F32x8 max = splat(kLn2) * load(scores + i);
    F32x8 score = max;
    if (log_sum_exp) score = select(max == infinity, max, max + log_positive(load(sums + i)));
    store(scores + i, score);
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
