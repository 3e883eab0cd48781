// Page scores from a query and the page summaries. Every head of a group scores a page from one reading of
// its summary; how the heads' scores become one is the group reduction's affair.

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/low_rank_score.h"
#include "cpu/score_vectors.h"
#include "cpu/simd.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

static_assert(kHeadBlock == kScoreHeads, "for_each_head_block cuts a group into blocks of kScoreHeads");

// Where a work item's queries and results are.
struct ScoreItem {
  int64_t row;
  int64_t head;
  int64_t row_head;
  int64_t first_page;  // logical page of the chunk's first summary
};

// Scores of a chunk's pages for kHeads query heads from g0 of the group on; scores: [num_pages, kScoreHeads].
template <int kHeads>
void score_heads(const core::ScorePagesParams& params, const ScoreItem& item, const SummaryChunk& chunk,
                 int64_t g0, float* scores) {
  const int64_t first_head = item.head * params.group_size + g0;
  if (!params.scorer->linear()) {
    LowRankQueries queries;
    for (int h = 0; h < kHeads; ++h) {
      load_low_rank_query(params.q, item.row, first_head + h, params.head_dim, params.sm_scale, h, queries);
    }
    score_low_rank<kHeads>(chunk, *params.scorer, queries, params.head_dim, params.page_size, scores);
    return;
  }
  alignas(64) float features[kMaxFeatures];
  float q[core::kMaxHeadDim];
  __builtin_memset(
      features, 0,
      static_cast<size_t>(params.scorer->num_vectors * kHeads * params.head_dim) * sizeof(float));
  for (int h = 0; h < kHeads; ++h) {
    load_query(params.q, item.row, first_head + h, params.head_dim, params.sm_scale, q);
    add_features(q, params.head_dim, *params.scorer, 1.0F, h, kHeads, features);
  }
  score_vectors<kHeads>(chunk, *params.scorer, features, params.head_dim, scores);
}

// The same for the mean of the group's features, as if it were one head.
void score_mean_head(const core::ScorePagesParams& params, const ScoreItem& item, const SummaryChunk& chunk,
                     float* scores) {
  alignas(64) float features[kMaxFeatures];
  float q[core::kMaxHeadDim];
  __builtin_memset(features, 0,
                   static_cast<size_t>(params.scorer->num_vectors * params.head_dim) * sizeof(float));
  for (int64_t g = 0; g < params.group_size; ++g) {
    load_query(params.q, item.row, item.head * params.group_size + g, params.head_dim, params.sm_scale, q);
    add_features(q, params.head_dim, *params.scorer, 1.0F / static_cast<float>(params.group_size), 0, 1,
                 features);
  }
  score_vectors<1>(chunk, *params.scorer, features, params.head_dim, scores);
}

// best[i] = the better of best[i] and head h's score of page i. NaN wins over every number, so that it stays
// visible and the selection ranks the page last.
inline void keep_best(const float* scores, int h, int64_t num_pages, float* best) {
  for (int64_t i = 0; i < num_pages; ++i) {
    const float score = scores[i * kScoreHeads + h];
    best[i] = score > best[i] || score != score ? score : best[i];
  }
}

void score_chunk(const core::ScorePagesParams& params, const ScoreItem& item, const SummaryChunk& chunk) {
  alignas(64) float scores[core::kScoreChunkPages * kScoreHeads];
  float* page_scores = params.page_scores + item.row_head * params.row_stride + item.first_page;
  if (params.group_reduction == core::GroupReduction::kMean) {
    score_mean_head(params, item, chunk, scores);
    for (int64_t i = 0; i < chunk.num_pages; ++i) page_scores[i] = scores[i * kScoreHeads];
    return;
  }
  if (params.group_reduction == core::GroupReduction::kMax) {
    for (int64_t i = 0; i < chunk.num_pages; ++i) page_scores[i] = -__builtin_inff();
  }
  for_each_head_block(params.group_size, [&](int64_t g0, auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    score_heads<kHeads>(params, item, chunk, g0, scores);
    for (int h = 0; h < kHeads; ++h) {
      if (params.group_reduction == core::GroupReduction::kMax) {
        keep_best(scores, h, chunk.num_pages, page_scores);
      } else {
        float* head_scores =
            params.head_scores + (item.row_head * params.group_size + g0 + h) * params.row_stride;
        for (int64_t i = 0; i < chunk.num_pages; ++i) {
          head_scores[item.first_page + i] = scores[i * kScoreHeads + h];
        }
      }
    }
  });
}

}  // namespace

void score_pages(const core::ScorePagesParams& params, int64_t begin, int64_t end) {
  const int64_t row_bytes = params.scorer->summary_bytes(params.head_dim, params.page_size);
  for (int64_t i = begin; i < end; ++i) {
    // Heads come before chunks: the rows of a page's heads are neighbours in memory and share cache lines.
    const int64_t head = i % params.num_kv_heads;
    const int64_t chunk = i / params.num_kv_heads % params.max_chunks;
    const int64_t row_idx = i / (params.num_kv_heads * params.max_chunks);
    const core::Row& row = params.rows[row_idx];
    const ScoreItem item{.row = row_idx,
                         .head = head,
                         .row_head = row_idx * params.num_kv_heads + head,
                         .first_page = row.first_page(params.page_size) + chunk * core::kScoreChunkPages};
    int64_t end_page = item.first_page + core::kScoreChunkPages;
    if (end_page > row.end_page(params.page_size)) end_page = row.end_page(params.page_size);
    // A page not full of visible tokens has no summary yet; it is the last one and always attended.
    int64_t sealed_end = row.num_tokens / params.page_size;
    if (sealed_end > end_page) sealed_end = end_page;
    if (item.first_page < sealed_end) {
      score_chunk(params, item,
                  {.summaries = params.page_summary,
                   .page_ids = row.page_table + item.first_page,
                   .num_pages = sealed_end - item.first_page,
                   .head = item.head,
                   .row_bytes = row_bytes});
    }
    for (int64_t page = sealed_end < item.first_page ? item.first_page : sealed_end; page < end_page;
         ++page) {
      params.page_scores[item.row_head * params.row_stride + page] = __builtin_inff();
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
