// Attention of one query row and kv head over a list of pages, cut into chunks of kChunkPages.
// A chunk is done in three passes (logits of every page, softmax, weighted values), so each page's K and
// V are read once for the whole query group; whoever finishes a row's last chunk joins them in list order.

#include <type_traits>

#include "core/limits.h"
#include "cpu/int8_page.h"
#include "cpu/kernels.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

using core::kChunkPages;

// How many blocks (K or V of a page) ahead memory is asked for: one is too late for pages that lie apart.
constexpr int64_t kPrefetchBlocks = 2;

constexpr int64_t kMaxChunkTokens = kChunkPages * core::kMaxPageSize;

// A page of the chunk: where it lies and which of its slots the row sees.
struct ChunkPage {
  int64_t page_id;
  int64_t first_slot;
  int64_t end_slot;
};

// The keys or values of a page and kv head, and of an int8 page its tokens' scales.
template <typename T>
struct Block {
  const T* data;
  const float* scales = nullptr;

  Block(const core::PagePoolView& pool, int64_t page_id, int64_t head) : data(pool.page<T>(page_id, head)) {
    if constexpr (std::is_same_v<T, int8_t>) scales = pool.token_scales(page_id, head);
  }
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

template <int kHeads, typename T>
inline void page_logits(const float* q, const core::PagePoolView& pool, const T* keys, const T* next,
                        int64_t page_size, int64_t head_dim, float* logits, int64_t stride) {
  if (pool.channel_major()) {
    channel_major_logits<kHeads>(q, keys, next, pool.channel_stride, page_size, head_dim, logits, stride);
  } else {
    page_logits_token_major<kHeads>(q, keys, pool.token_stride, page_size, head_dim, logits, stride);
  }
}

float log_sum_exp(const float* logits, int64_t n, float* scratch) {
  __builtin_memcpy(scratch, logits, static_cast<size_t>(n) * sizeof(float));
  const float max = maximum(logits, n);
  const float sum = softmax_numerators(scratch, n, max);
  return sum == 0.0F ? kMinusInfinity : (max == kMinusInfinity ? 0.0F : max) + __builtin_logf(sum);
}

// One work item: a chunk of the page list of one row and kv head.
struct Chunk {
  int64_t row_idx;
  int64_t head;
  int64_t row_head;
  int64_t index;  // of the chunk within its list
  int64_t num_pages;
  ChunkPage pages[kChunkPages];
};

int64_t list_length(const core::AttendPagesParams& params, int64_t row_head, const core::Row& row) {
  return params.num_selected != nullptr ? params.num_selected[row_head]
                                        : row.num_visible_pages(params.page_size);
}

// Heads come before chunks: the blocks of a page's heads are neighbours in memory, so what the hardware reads
// past the end of one is the beginning of the next item's.
void find_chunk(const core::AttendPagesParams& params, int64_t item, Chunk& chunk) {
  const int64_t page_size = params.page_size;
  chunk.head = item % params.num_kv_heads;
  chunk.index = item / params.num_kv_heads % params.max_chunks;
  chunk.row_idx = item / (params.num_kv_heads * params.max_chunks);
  chunk.row_head = chunk.row_idx * params.num_kv_heads + chunk.head;
  const core::Row& row = params.rows[chunk.row_idx];
  const int64_t list_begin = chunk.index * kChunkPages;
  const int64_t rest = list_length(params, chunk.row_head, row) - list_begin;
  chunk.num_pages = rest < kChunkPages ? (rest > 0 ? rest : 0) : kChunkPages;
  for (int64_t i = 0; i < chunk.num_pages; ++i) {
    const int64_t entry = list_begin + i;
    const int64_t logical = params.selected_pages != nullptr
                                ? params.selected_pages[chunk.row_head * params.list_width + entry]
                                : row.first_page(page_size) + entry;
    const int64_t first = row.first_token - logical * page_size;
    const int64_t last = row.num_tokens - logical * page_size;
    chunk.pages[i] = {.page_id = row.page_table[logical],
                      .first_slot = first > page_size ? page_size : (first > 0 ? first : 0),
                      .end_slot = last < page_size ? last : page_size};
  }
}

float* partial_of(const core::AttendPagesParams& params, int64_t row_head, int64_t chunk) {
  return params.partials + (row_head * params.max_chunks + chunk) * params.group_size * (params.head_dim + 2);
}

// The query heads of a group are taken kHeadBlock at a time to bound the logits on the stack; the pages of
// a chunk then come from the cache for every block but the first.
// int8 pages are multiplied in integers, by queries and probabilities rounded to 16 bits (int8_page.h).
template <typename T>
void attend_chunk(const core::AttendPagesParams& params, const Chunk& chunk, const Chunk& next_chunk) {
  constexpr bool kInt8 = std::is_same_v<T, int8_t>;
  const ChunkPage* pages = chunk.pages;
  const int64_t num_pages = chunk.num_pages;
  const auto keys_of = [&](const Chunk& of, int64_t i) {
    return Block<T>(params.k_pages, of.pages[i].page_id, of.head);
  };
  const auto values_of = [&](int64_t i) { return Block<T>(params.v_pages, pages[i].page_id, chunk.head); };
  // Blocks in the order they are read: the chunk's keys, its values, the next chunk's keys. Channel-major or
  // not, a page's keys take as many bytes as its values.
  const auto prefetched_at = [&](int64_t block) {
    block += kPrefetchBlocks;
    if (block < num_pages) return keys_of(chunk, block);
    block -= num_pages;
    if (block < num_pages) return values_of(block);
    block -= num_pages;
    return block < next_chunk.num_pages ? keys_of(next_chunk, block) : values_of(num_pages - 1);
  };
  const int64_t head_dim = params.head_dim;
  const int64_t slots = round_up(params.page_size);
  const int64_t stride = num_pages * slots;
  alignas(64) float q[kHeadBlock * core::kMaxHeadDim];
  QueryCodes q_codes;
  alignas(64) float logits[kHeadBlock * kMaxChunkTokens];
  float scratch[core::kMaxPageSize];
  float* acc = partial_of(params, chunk.row_head, chunk.index);
  float* maxima = acc + params.group_size * head_dim;
  float* sums = maxima + params.group_size;

  for_each_head_block(params.group_size, [&](int64_t g0, auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    for (int g = 0; g < kHeads; ++g) {
      const int64_t query_head = chunk.head * params.group_size + g0 + g;
      load_query(params.q, chunk.row_idx, query_head, head_dim, params.sm_scale, q + g * head_dim);
    }
    if constexpr (kInt8) q_codes.template round<kHeads>(q, head_dim);
    for (int64_t i = 0; i < num_pages; ++i) {
      const ChunkPage& page = pages[i];
      float* page_begin = logits + i * slots;
      const Block<T> keys = keys_of(chunk, i);
      const Block<T> next = prefetched_at(i);
      if constexpr (kInt8) {
        prefetch(next.scales);
        int8_logits<kHeads>(q_codes, params.k_pages, keys.data, keys.scales, next.data, params.page_size,
                            head_dim, page_begin, stride);
      } else {
        page_logits<kHeads>(q, params.k_pages, keys.data, next.data, params.page_size, head_dim, page_begin,
                            stride);
      }
      for (int g = 0; g < kHeads; ++g) {
        float* page_logit = page_begin + g * stride;
        for (int64_t t = 0; t < page.first_slot; ++t) page_logit[t] = kMinusInfinity;
        for (int64_t t = page.end_slot; t < slots; ++t) page_logit[t] = kMinusInfinity;
        if (params.page_lse != nullptr) {
          const int64_t query_head = chunk.row_head * params.group_size + g0 + g;
          params.page_lse[query_head * params.list_width + chunk.index * kChunkPages + i] =
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
      const Block<T> values = values_of(i);
      const Block<T> next = prefetched_at(num_pages + i);
      if constexpr (kInt8) {
        prefetch(next.scales);
        accumulate_int8_values<kHeads>(logits + i * slots, stride, values.data, next.data,
                                       params.v_pages.token_stride, values.scales, page.first_slot,
                                       page.end_slot, params.page_size, head_dim, block_acc);
      } else {
        accumulate_values<kHeads>(logits + i * slots, stride, values.data, next.data,
                                  params.v_pages.token_stride, page.first_slot, page.end_slot, head_dim,
                                  block_acc);
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      if constexpr (kInt8) {
        restore_int8_channels(block_acc + g * head_dim, head_dim);
      } else {
        restore_channels<T>(block_acc + g * head_dim, head_dim);
      }
    }
  });
}

// Joins the chunks of one row and kv head in list order. An empty list gives zeros and lse -inf.
void merge_chunks(const core::AttendPagesParams& params, int64_t row_head, int64_t num_chunks) {
  const int64_t head_dim = params.head_dim;
  float merged[core::kMaxHeadDim];
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

// Whether this was the last of the list's chunks to be done. The counter orders the others' partial results
// before the merge, whichever threads they ran on.
bool finishes_list(const core::AttendPagesParams& params, int64_t row_head, int64_t num_chunks) {
  return num_chunks <= 1 ||
         __atomic_add_fetch(params.chunks_done + row_head, 1, __ATOMIC_ACQ_REL) == num_chunks;
}

}  // namespace

void attend_pages(const core::AttendPagesParams& params, int64_t begin, int64_t end) {
  Chunk chunks[2];
  find_chunk(params, begin, chunks[begin % 2]);
  for (int64_t item = begin; item < end; ++item) {
    const Chunk& chunk = chunks[item % 2];
    Chunk& next_chunk = chunks[(item + 1) % 2];
    if (item + 1 < end) {
      find_chunk(params, item + 1, next_chunk);
    } else {
      next_chunk.num_pages = 0;
    }
    if (chunk.num_pages > 0) {
      dispatch_page_element(params.k_pages.type, [&](auto* tag) {
        attend_chunk<std::remove_pointer_t<decltype(tag)>>(params, chunk, next_chunk);
      });
    } else if (chunk.index > 0) {
      continue;
    }
    const int64_t num_pages = list_length(params, chunk.row_head, params.rows[chunk.row_idx]);
    const int64_t num_chunks = (num_pages + kChunkPages - 1) / kChunkPages;
    if (finishes_list(params, chunk.row_head, num_chunks)) {
      merge_chunks(params, chunk.row_head, num_chunks);
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
