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

static_assert(kHeadBlock == kScoreHeads, "with_num_heads takes up to kScoreHeads");

// Streams (see there) that go through the pages at once, and how much they may hold: they share the
// first-level cache with the summaries.
constexpr int64_t kMaxStreams = 16;
constexpr int64_t kMaxStreamBytes = 16384;

// How far ahead summaries are asked for.
constexpr int64_t kAheadBytes = 16384;

// Query heads of one kv head that score together, or one that stands for the mean of its group.
struct Stream {
  int64_t head;         // of the kv heads
  int64_t first_query;  // of the group
  int64_t num_queries;
  union {
    alignas(64) float features[kMaxFeatures];
    LowRankQueries low_rank;
  };
};

int64_t streams_per_head(const core::ScorePagesParams& params) {
  if (params.group_reduction == core::GroupReduction::kMean) return 1;
  return (params.group_size + kScoreHeads - 1) / kScoreHeads;
}

int64_t streams_at_once(const core::ScorePagesParams& params) {
  const int64_t num_queries = params.group_reduction == core::GroupReduction::kMean ? 1 : kScoreHeads;
  const int64_t channel_bytes = params.scorer->linear()
                                    ? params.scorer->num_vectors * static_cast<int64_t>(sizeof(float))
                                    : 2 * static_cast<int64_t>(sizeof(int16_t));
  const int64_t fitting = kMaxStreamBytes / (num_queries * params.head_dim * channel_bytes);
  return fitting < 1 ? 1 : (fitting < kMaxStreams ? fitting : kMaxStreams);
}

void load_features(const core::ScorePagesParams& params, int64_t row, Stream& stream) {
  const bool mean = params.group_reduction == core::GroupReduction::kMean;
  const int64_t num_loaded = mean ? params.group_size : stream.num_queries;
  const float scale = mean ? 1.0F / static_cast<float>(params.group_size) : 1.0F;
  float q[core::kMaxHeadDim];
  __builtin_memset(
      stream.features, 0,
      static_cast<size_t>(params.scorer->num_vectors * stream.num_queries * params.head_dim) * sizeof(float));
  for (int64_t h = 0; h < num_loaded; ++h) {
    const int64_t query_head = stream.head * params.group_size + stream.first_query + h;
    load_query(params.q, row, query_head, params.head_dim, params.sm_scale, q);
    add_features(q, params.head_dim, *params.scorer, scale, mean ? 0 : h, stream.num_queries,
                 stream.features);
  }
}

void load_stream(const core::ScorePagesParams& params, int64_t row, Stream& stream) {
  if (params.scorer->linear()) return load_features(params, row, stream);
  for (int64_t h = 0; h < stream.num_queries; ++h) {
    const int64_t query_head = stream.head * params.group_size + stream.first_query + h;
    load_low_rank_query(params.q, row, query_head, params.head_dim, params.sm_scale, h, stream.low_rank);
  }
}

// best[i] = the better of best[i] and head h's score of page i. NaN wins over every number, so that it stays
// visible and the selection ranks the page last.
inline void keep_best(const float* scores, int64_t h, int64_t num_pages, float* best) {
  for (int64_t i = 0; i < num_pages; ++i) {
    const float score = scores[i * kScoreHeads + h];
    best[i] = score > best[i] || score != score ? score : best[i];
  }
}

// Scores of the block's pages, the first of which is logical page `first_page`, to where the reduction wants
// them.
void score_block(const core::ScorePagesParams& params, int64_t row, const SummaryBlock& block,
                 const Stream& stream, int64_t first_page) {
  alignas(64) float scores[kScoreBlockPages * kScoreHeads];
  with_num_heads(stream.num_queries, [&](auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    if (params.scorer->linear()) {
      score_vectors<kHeads>(block, *params.scorer, stream.features, params.head_dim, scores);
    } else {
      score_low_rank<kHeads>(block, *params.scorer, stream.low_rank, params.head_dim, params.page_size,
                             scores);
    }
  });
  const int64_t row_head = row * params.num_kv_heads + stream.head;
  for (int64_t h = 0; h < stream.num_queries; ++h) {
    if (params.group_reduction == core::GroupReduction::kMax) {
      keep_best(scores, h, block.num_pages, params.page_scores + row_head * params.row_stride + first_page);
      continue;
    }
    const bool mean = params.group_reduction == core::GroupReduction::kMean;
    float* to = mean ? params.page_scores + row_head * params.row_stride
                     : params.head_scores +
                           (row_head * params.group_size + stream.first_query + h) * params.row_stride;
    for (int64_t i = 0; i < block.num_pages; ++i) to[first_page + i] = scores[i * kScoreHeads + h];
  }
}

// Scores of sealed pages, the first of which is logical page `first_page`, for the heads of `rows`. All of
// them go through a few pages before the next ones come, so that memory is read from end to end.
void score_rows(const core::ScorePagesParams& params, int64_t row, const SummaryRows& rows,
                int64_t first_page) {
  Stream streams[kMaxStreams];
  const int64_t per_head = streams_per_head(params);
  const int64_t num_streams = rows.num_heads * per_head;
  const int64_t at_once = streams_at_once(params);
  for (int64_t first = 0; first < num_streams; first += at_once) {
    const int64_t count = num_streams - first < at_once ? num_streams - first : at_once;
    for (int64_t i = 0; i < count; ++i) {
      Stream& stream = streams[i];
      stream.head = rows.first_head + (first + i) / per_head;
      stream.first_query = (first + i) % per_head * kScoreHeads;
      const int64_t rest = params.group_size - stream.first_query;
      stream.num_queries = rest < kScoreHeads ? rest : kScoreHeads;
      if (params.group_reduction == core::GroupReduction::kMean) stream.num_queries = 1;
      load_stream(params, row, stream);
    }
    RowsAhead ahead(rows, kAheadBytes);
    for (int64_t page = 0; page < rows.num_pages; page += kScoreBlockPages) {
      const int64_t rest = rows.num_pages - page;
      for (int64_t i = 0; i < count; ++i) {
        const SummaryBlock block{.rows = rows,
                                 .first_page = page,
                                 .num_pages = rest < kScoreBlockPages ? rest : kScoreBlockPages,
                                 .head = streams[i].head,
                                 .ahead = ahead};
        score_block(params, row, block, streams[i], first_page + page);
      }
    }
  }
}

}  // namespace

void score_pages(const core::ScorePagesParams& params, int64_t begin, int64_t end) {
  const int64_t row_bytes = params.scorer->summary_bytes(params.head_dim, params.page_size);
  const int64_t fitting_heads = streams_at_once(params) / streams_per_head(params);
  const int64_t heads_at_once = fitting_heads < 1 ? 1 : fitting_heads;
  for (int64_t i = begin, num_heads; i < end; i += num_heads) {
    // Heads come before chunks: the rows of a page's heads are neighbours in memory and share cache lines.
    const int64_t first_head = i % params.num_kv_heads;
    const int64_t chunk = i / params.num_kv_heads % params.max_chunks;
    const int64_t row_idx = i / (params.num_kv_heads * params.max_chunks);
    num_heads = params.num_kv_heads - first_head < end - i ? params.num_kv_heads - first_head : end - i;
    if (num_heads > heads_at_once) num_heads = heads_at_once;
    const core::Row& row = params.rows[row_idx];
    const int64_t first_page = row.first_page(params.page_size) + chunk * core::kScoreChunkPages;
    int64_t end_page = first_page + core::kScoreChunkPages;
    if (end_page > row.end_page(params.page_size)) end_page = row.end_page(params.page_size);
    // A page not full of visible tokens has no summary yet; it is the last one and always attended.
    int64_t sealed_end = row.num_tokens / params.page_size;
    if (sealed_end > end_page) sealed_end = end_page;
    if (sealed_end < first_page) sealed_end = first_page;
    for (int64_t head = first_head; head < first_head + num_heads; ++head) {
      float* page_scores = params.page_scores + (row_idx * params.num_kv_heads + head) * params.row_stride;
      if (params.group_reduction == core::GroupReduction::kMax) {
        for (int64_t page = first_page; page < sealed_end; ++page) page_scores[page] = -__builtin_inff();
      }
      for (int64_t page = sealed_end; page < end_page; ++page) page_scores[page] = __builtin_inff();
    }
    if (first_page < sealed_end) {
      score_rows(params, row_idx,
                 {.summaries = params.page_summary,
                  .page_ids = row.page_table + first_page,
                  .num_pages = sealed_end - first_page,
                  .first_head = first_head,
                  .num_heads = num_heads,
                  .row_bytes = row_bytes},
                 first_page);
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
