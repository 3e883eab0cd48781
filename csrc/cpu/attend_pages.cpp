// Attention of one query row and kv head over a list of pages, cut into chunks of kChunkPages.
// A chunk is done in three passes (logits of every page, softmax, weighted values), so each page's K and
// V are read once for the whole query group; merge_chunks joins a row's chunks in list order.

#include <type_traits>

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

using core::kChunkPages;

constexpr int64_t kMaxChunkTokens = kChunkPages * core::kMaxPageSize;

// A page of the chunk: where it lies and which of its slots the row sees.
struct ChunkPage {
  int64_t page_id;
  int64_t first_slot;
  int64_t end_slot;
};

template <int kHeads, typename T>
inline void page_logits_token_major(const float* q, const T* keys, int64_t token_stride, int64_t page_size,
                                    int64_t head_dim, float* logits, int64_t stride) {
  for (int64_t t = 0; t < page_size; ++t) {
    F32x8 sum[kHeads];
    for (int g = 0; g < kHeads; ++g) sum[g] = splat(0.0F);
    const T* token = keys + t * token_stride;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const F32x8 k = load(token + d);
      for (int g = 0; g < kHeads; ++g) sum[g] += load(q + g * head_dim + d) * k;
    }
    for (int g = 0; g < kHeads; ++g) logits[g * stride + t] = horizontal_sum(sum[g]);
  }
}

// Asks for the next block while the current one is worked on: blocks of one head lie apart, and the
// hardware does not look past a 4 KiB page. A wrong address does no harm.
inline void prefetch_block(const void* block, int64_t bytes) {
  const char* line = static_cast<const char*>(block);
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(line + offset);
}

template <int kHeads, typename T>
inline void page_logits(const float* q, const core::PagePoolView& pool, const T* keys, int64_t page_size,
                        int64_t head_dim, float* logits, int64_t stride) {
  if (pool.channel_major()) {
    channel_major_logits<kHeads>(q, keys, pool.channel_stride, page_size, head_dim, logits, stride);
  } else {
    page_logits_token_major<kHeads>(q, keys, pool.token_stride, page_size, head_dim, logits, stride);
  }
}

// Folds the scales of int8 keys into the logits, of int8 values into the probabilities: [first, end) slots of
// one page, for every head of the block.
template <int kHeads>
inline void multiply_by_scales(const float* scales, int64_t first_slot, int64_t end_slot, float* slots,
                               int64_t stride) {
  for (int g = 0; g < kHeads; ++g) {
    for (int64_t t = first_slot; t < end_slot; ++t) slots[g * stride + t] *= scales[t];
  }
}

float log_sum_exp(const float* logits, int64_t n, float* scratch) {
  __builtin_memcpy(scratch, logits, static_cast<size_t>(n) * sizeof(float));
  const float max = maximum(logits, n);
  const float sum = softmax_numerators(scratch, n, max);
  return sum == 0.0F ? kMinusInfinity : (max == kMinusInfinity ? 0.0F : max) + __builtin_logf(sum);
}

struct ChunkItem {
  int64_t row_idx;
  int64_t head;
  int64_t row_head;
  int64_t chunk;
};

// The query heads of a group are taken kHeadBlock at a time to bound the logits on the stack; the pages of
// a chunk then come from the cache for every block but the first.
template <typename T>
void attend_chunk(const core::AttendPagesParams& params, const ChunkItem& item, const ChunkPage* pages,
                  int64_t num_pages, float* partial) {
  const int64_t head_dim = params.head_dim;
  const int64_t slots = round_up(params.page_size);
  const int64_t stride = num_pages * slots;
  alignas(64) float q[kHeadBlock * core::kMaxHeadDim];
  alignas(64) float logits[kHeadBlock * kMaxChunkTokens];
  float scratch[core::kMaxPageSize];
  float* acc = partial;
  float* maxima = partial + params.group_size * head_dim;
  float* sums = maxima + params.group_size;

  const int64_t block_bytes = params.page_size * head_dim * static_cast<int64_t>(sizeof(T));

  for_each_head_block(params.group_size, [&](int64_t g0, auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    for (int g = 0; g < kHeads; ++g) {
      const int64_t query_head = item.head * params.group_size + g0 + g;
      load_query(params.q, item.row_idx, query_head, head_dim, params.sm_scale, q + g * head_dim);
    }
    for (int64_t i = 0; i < num_pages; ++i) {
      const ChunkPage& page = pages[i];
      float* page_begin = logits + i * slots;
      prefetch_block(i + 1 < num_pages ? params.k_pages.page<T>(pages[i + 1].page_id, item.head)
                                       : params.v_pages.page<T>(pages[0].page_id, item.head),
                     block_bytes);
      page_logits<kHeads>(q, params.k_pages, params.k_pages.page<T>(page.page_id, item.head),
                          params.page_size, head_dim, page_begin, stride);
      if constexpr (std::is_same_v<T, int8_t>) {
        multiply_by_scales<kHeads>(params.k_pages.token_scales(page.page_id, item.head), page.first_slot,
                                   page.end_slot, page_begin, stride);
      }
      for (int g = 0; g < kHeads; ++g) {
        float* page_logit = page_begin + g * stride;
        for (int64_t t = 0; t < page.first_slot; ++t) page_logit[t] = kMinusInfinity;
        for (int64_t t = page.end_slot; t < slots; ++t) page_logit[t] = kMinusInfinity;
        if (params.page_lse != nullptr) {
          const int64_t query_head = item.row_head * params.group_size + g0 + g;
          params.page_lse[query_head * params.list_width + item.chunk * kChunkPages + i] =
              log_sum_exp(page_logit, slots, scratch);
        }
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      maxima[g0 + g] = maximum(logits + g * stride, stride);
      sums[g0 + g] = softmax_numerators(logits + g * stride, stride, maxima[g0 + g]);
    }
    float* block_acc = acc + g0 * head_dim;
    __builtin_memset(block_acc, 0, static_cast<size_t>(kHeads * head_dim) * sizeof(float));
    for (int64_t i = 0; i < num_pages; ++i) {
      const ChunkPage& page = pages[i];
      if (i + 1 < num_pages)
        prefetch_block(params.v_pages.page<T>(pages[i + 1].page_id, item.head), block_bytes);
      if constexpr (std::is_same_v<T, int8_t>) {
        multiply_by_scales<kHeads>(params.v_pages.token_scales(page.page_id, item.head), page.first_slot,
                                   page.end_slot, logits + i * slots, stride);
      }
      accumulate_values<kHeads>(logits + i * slots, stride, params.v_pages.page<T>(page.page_id, item.head),
                                params.v_pages.token_stride, page.first_slot, page.end_slot, head_dim,
                                block_acc);
    }
  });
}

int64_t list_length(const core::AttendPagesParams& params, int64_t row_head, const core::Row& row) {
  return params.num_selected != nullptr ? params.num_selected[row_head]
                                        : row.num_visible_pages(params.page_size);
}

float* partial_of(const core::AttendPagesParams& params, int64_t row_head, int64_t chunk) {
  return params.partials + (row_head * params.max_chunks + chunk) * params.group_size * (params.head_dim + 2);
}

}  // namespace

void attend_pages(const core::AttendPagesParams& params, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row_head = i / params.max_chunks;
    const ChunkItem item{.row_idx = row_head / params.num_kv_heads,
                         .head = row_head % params.num_kv_heads,
                         .row_head = row_head,
                         .chunk = i % params.max_chunks};
    const core::Row& row = params.rows[item.row_idx];
    const int64_t list_begin = item.chunk * kChunkPages;
    int64_t list_end = list_length(params, row_head, row);
    if (list_end > list_begin + kChunkPages) list_end = list_begin + kChunkPages;
    if (list_begin >= list_end) continue;

    ChunkPage pages[kChunkPages];
    for (int64_t entry = list_begin; entry < list_end; ++entry) {
      const int64_t logical = params.selected_pages != nullptr
                                  ? params.selected_pages[row_head * params.list_width + entry]
                                  : row.first_page(params.page_size) + entry;
      const int64_t page_begin = logical * params.page_size;
      const int64_t first = row.first_token - page_begin;
      const int64_t last = row.num_tokens - page_begin;
      pages[entry - list_begin] = {
          .page_id = row.page_table[logical],
          .first_slot = first > params.page_size ? params.page_size : (first > 0 ? first : 0),
          .end_slot = last < params.page_size ? last : params.page_size};
    }
    dispatch_page_element(params.k_pages.type, [&](auto* tag) {
      attend_chunk<std::remove_pointer_t<decltype(tag)>>(params, item, pages, list_end - list_begin,
                                                         partial_of(params, row_head, item.chunk));
    });
  }
}

void merge_chunks(const core::AttendPagesParams& params, int64_t begin, int64_t end) {
  const int64_t head_dim = params.head_dim;
  float merged[core::kMaxHeadDim];
  for (int64_t row_head = begin; row_head < end; ++row_head) {
    const core::Row& row = params.rows[row_head / params.num_kv_heads];
    const int64_t num_chunks = (list_length(params, row_head, row) + kChunkPages - 1) / kChunkPages;
    for (int64_t g = 0; g < params.group_size; ++g) {
      const auto chunk_max = [&](int64_t c) {
        return partial_of(params, row_head, c)[params.group_size * head_dim + g];
      };
      const auto chunk_sum = [&](int64_t c) {
        return partial_of(params, row_head, c)[params.group_size * (head_dim + 1) + g];
      };
      float max = kMinusInfinity;
      for (int64_t c = 0; c < num_chunks; ++c) {
        if (chunk_max(c) > max) max = chunk_max(c);
      }
      const float shift = max == kMinusInfinity ? 0.0F : max;
      float sum = 0.0F;
      __builtin_memset(merged, 0, static_cast<size_t>(head_dim) * sizeof(float));
      for (int64_t c = 0; c < num_chunks; ++c) {
        // A chunk without a finite logit took its numerators relative to 0.
        const float own_shift = chunk_max(c) == kMinusInfinity ? 0.0F : chunk_max(c);
        const float weight = chunk_sum(c) == 0.0F ? 0.0F : exp_nonpositive(own_shift - shift);
        sum += weight * chunk_sum(c);
        const float* acc = partial_of(params, row_head, c) + g * head_dim;
        for (int64_t d = 0; d < head_dim; d += kLanes) {
          store(merged + d, load(merged + d) + splat(weight) * load(acc + d));
        }
      }
      const int64_t query_head = row_head * params.group_size + g;
      const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
      dispatch_element(params.q.type, [&](auto* tag) {
        auto* out = static_cast<decltype(tag)>(params.out) + query_head * head_dim;
        for (int64_t d = 0; d < head_dim; ++d) from_float(merged[d] * inverse, out[d]);
      });
      params.lse[query_head] = sum == 0.0F ? kMinusInfinity : shift + __builtin_logf(sum);
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
