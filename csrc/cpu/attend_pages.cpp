// Attention of one query row and kv head over a list of pages, cut into chunks of kChunkPages.
// A chunk is done in three passes (logits of every page, softmax, weighted values), so each page's K and
// V are read once for the whole query group; whoever finishes a row's last chunk joins them in list order.

#include <type_traits>

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/page_products.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

using core::kChunkPages;

// How far ahead memory is asked for, the first time twice as far. Blocks (K or V of a page) below 1 KiB count
// as 1 KiB.
constexpr int64_t kAheadBytes = 16384;
constexpr int64_t kMinBlockBytes = 1024;

// Streams (see there) that a chunk is worked on with at once. Bounds what a worker keeps on its stack.
constexpr int64_t kMaxStreams = 16;

// A page of the chunk: where it lies and which of its slots the row sees.
struct ChunkPage {
  int64_t page_id;
  int64_t first_slot;
  int64_t end_slot;
};

float log_sum_exp(const float* logits, int64_t n, float* scratch) {
  __builtin_memcpy(scratch, logits, static_cast<size_t>(n) * sizeof(float));
  const float max = maximum(logits, n);
  const float sum = softmax_numerators(scratch, n, max);
  return sum == 0.0F ? kMinusInfinity : (max == kMinusInfinity ? 0.0F : max) + __builtin_logf(sum);
}

// A chunk of the page list of one row, for a run of kv heads that share the list: a work item of each head.
struct Chunk {
  int64_t row_idx;
  int64_t first_head;
  int64_t num_heads;
  int64_t index;  // of the chunk within its list
  int64_t num_pages;
  ChunkPage pages[kChunkPages];
};

int64_t list_length(const core::AttendPagesParams& params, int64_t row_head, const core::Row& row) {
  return params.num_selected != nullptr ? params.num_selected[row_head]
                                        : row.num_visible_pages(params.page_size);
}

int64_t num_head_blocks(const core::AttendPagesParams& params) {
  return (params.group_size + kHeadBlock - 1) / kHeadBlock;
}

// The chunk of `item`, with as many of the items before `end` as are worked on at once.
// Heads come before chunks: the blocks of a page's heads are neighbours in memory, so dense attention to
// pages in their order reads memory from end to end.
void find_chunk(const core::AttendPagesParams& params, int64_t item, int64_t end, Chunk& chunk) {
  const int64_t page_size = params.page_size;
  chunk.first_head = item % params.num_kv_heads;
  chunk.index = item / params.num_kv_heads % params.max_chunks;
  chunk.row_idx = item / (params.num_kv_heads * params.max_chunks);
  chunk.num_heads = 1;
  if (params.selected_pages == nullptr) {
    const auto smaller = [](int64_t a, int64_t b) { return a < b ? a : b; };
    const int64_t at_once = kMaxStreams / num_head_blocks(params);
    const int64_t left = smaller(end - item, params.num_kv_heads - chunk.first_head);
    if (at_once > 1) chunk.num_heads = smaller(at_once, left);
  }
  const int64_t row_head = chunk.row_idx * params.num_kv_heads + chunk.first_head;
  const core::Row& row = params.rows[chunk.row_idx];
  const int64_t list_begin = chunk.index * kChunkPages;
  const int64_t rest = list_length(params, row_head, row) - list_begin;
  chunk.num_pages = rest < kChunkPages ? (rest > 0 ? rest : 0) : kChunkPages;
  for (int64_t i = 0; i < chunk.num_pages; ++i) {
    const int64_t entry = list_begin + i;
    const int64_t logical = params.selected_pages != nullptr
                                ? params.selected_pages[row_head * params.list_width + entry]
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

// The blocks of a chunk in the order they are read, and on into the next chunk's keys; then the last one for
// ever.
template <typename T>
class BlockOrder {
 public:
  BlockOrder(const core::AttendPagesParams& params, const Chunk& chunk, const Chunk& next_chunk, int64_t skip)
      : params_(params), chunk_(&chunk), next_chunk_(next_chunk), pool_(&params.k_pages) {
    for (int64_t i = 0; i < skip; ++i) step();
  }

  Block<T> next() {
    const Block<T> block(*pool_, chunk_->pages[page_].page_id, chunk_->first_head + head_);
    step();
    return block;
  }

 private:
  void step() {
    if (++head_ < chunk_->num_heads) return;
    head_ = 0;
    if (++page_ < chunk_->num_pages) return;
    page_ = 0;
    if (pool_ == &params_.k_pages) {
      pool_ = &params_.v_pages;
    } else if (chunk_ != &next_chunk_ && next_chunk_.num_pages > 0) {
      pool_ = &params_.k_pages;
      chunk_ = &next_chunk_;
    } else {
      page_ = chunk_->num_pages - 1;
      head_ = chunk_->num_heads - 1;
    }
  }

  const core::AttendPagesParams& params_;
  const Chunk* chunk_;
  const Chunk& next_chunk_;
  const core::PagePoolView* pool_;
  int64_t page_ = 0;
  int64_t head_ = 0;
};

// Query heads of one kv head, kHeadBlock of them at most, on their way through a chunk.
template <typename Products>
struct Stream {
  int64_t first_query;  // of the row's query heads
  int64_t num_queries;
  float* acc;  // [num_queries, head_dim] of the partial result
  float* maxima;
  float* sums;
  Products products;
  alignas(64) float logits[kHeadBlock * kMaxChunkTokens];  // [num_queries, num_pages, slots]
};

// `num_blocks` head blocks of each kv head of a chunk, from `first_block` on. All of them go through a page
// before the next one, so that a page comes from memory once.
template <typename Products>
void attend_chunk(const core::AttendPagesParams& params, const Chunk& chunk, const Chunk& next_chunk,
                  int64_t first_block, int64_t num_blocks) {
  using T = typename Products::Element;
  const int64_t head_dim = params.head_dim;
  const int64_t slots = round_up(params.page_size);
  const int64_t stride = chunk.num_pages * slots;
  // Channel-major or not, a page's keys take as many bytes as its values.
  const int64_t bytes = params.page_size * head_dim * static_cast<int64_t>(sizeof(T));
  const int64_t block_bytes = bytes < kMinBlockBytes ? kMinBlockBytes : bytes;
  const int64_t blocks_ahead = block_bytes >= kAheadBytes ? 1 : kAheadBytes / block_bytes;
  BlockOrder<T> blocks(params, chunk, next_chunk, 0);
  BlockOrder<T> soon(params, chunk, next_chunk, blocks_ahead);
  BlockOrder<T> later(params, chunk, next_chunk, 2 * blocks_ahead);
  float scratch[core::kMaxPageSize];
  Stream<Products> streams[kMaxStreams];
  const int64_t num_streams = chunk.num_heads * num_blocks;

  // f(stream, number of its queries as a constant) for streams [begin, end).
  const auto for_streams = [&](int64_t begin, int64_t end, const auto& f) {
    for (int64_t i = begin; i < end; ++i) {
      with_num_heads(streams[i].num_queries, [&](auto heads) { f(streams[i], heads); });
    }
  };
  // f(page index, block, blocks to come, stream, number of its queries) for every page and stream.
  const auto for_blocks = [&](const auto& f) {
    for (int64_t i = 0; i < chunk.num_pages; ++i) {
      for (int64_t begin = 0; begin < num_streams; begin += num_blocks) {
        const Block<T> block = blocks.next();
        const Next<T> next = {soon.next(), later.next()};
        for_streams(begin, begin + num_blocks,
                    [&](Stream<Products>& stream, auto heads) { f(i, block, next, stream, heads); });
      }
    }
  };

  for (int64_t i = 0; i < num_streams; ++i) {
    const int64_t head = chunk.first_head + i / num_blocks;
    const int64_t in_group = (first_block + i % num_blocks) * kHeadBlock;
    const int64_t rest = params.group_size - in_group;
    float* partial = partial_of(params, chunk.row_idx * params.num_kv_heads + head, chunk.index);
    Stream<Products>& stream = streams[i];
    stream.first_query = head * params.group_size + in_group;
    stream.num_queries = rest < kHeadBlock ? rest : kHeadBlock;
    stream.acc = partial + in_group * head_dim;
    stream.maxima = partial + params.group_size * head_dim + in_group;
    stream.sums = stream.maxima + params.group_size;
  }
  for_streams(0, num_streams, [&](Stream<Products>& stream, auto heads) {
    stream.products.template load_queries<decltype(heads)::value>(params, chunk.row_idx, stream.first_query);
  });
  for_blocks([&](int64_t i, Block<T> keys, Next<T> next, Stream<Products>& stream, auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    const ChunkPage& page = chunk.pages[i];
    float* page_begin = stream.logits + i * slots;
    stream.products.template logits<kHeads>(params, keys, next, page_begin, stride);
    for (int g = 0; g < kHeads; ++g) {
      float* page_logit = page_begin + g * stride;
      for (int64_t t = 0; t < page.first_slot; ++t) page_logit[t] = kMinusInfinity;
      for (int64_t t = page.end_slot; t < slots; ++t) page_logit[t] = kMinusInfinity;
      if (params.page_lse != nullptr) {
        const int64_t query_head =
            chunk.row_idx * params.num_kv_heads * params.group_size + stream.first_query + g;
        params.page_lse[query_head * params.list_width + chunk.index * kChunkPages + i] =
            log_sum_exp(page_logit, slots, scratch);
      }
    }
  });
  for_streams(0, num_streams, [&](Stream<Products>& stream, auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    stream.products.template take_weights<kHeads>(stream.logits, stride, stream.maxima, stream.sums);
    __builtin_memset(stream.acc, 0, static_cast<size_t>(kHeads * head_dim) * sizeof(float));
  });
  for_blocks([&](int64_t i, Block<T> values, Next<T> next, Stream<Products>& stream, auto heads) {
    const ChunkPage& page = chunk.pages[i];
    stream.products.template add_values<decltype(heads)::value>(params, values, next, i * slots, stride,
                                                                page.first_slot, page.end_slot, stream.acc);
  });
  for_streams(0, num_streams, [&](Stream<Products>& stream, auto heads) {
    for (int g = 0; g < decltype(heads)::value; ++g) {
      stream.products.finish(g, stream.acc + g * head_dim, head_dim);
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
  find_chunk(params, begin, end, chunks[0]);
  for (int64_t item = begin, next_item, turn = 0; item < end; item = next_item, turn ^= 1) {
    const Chunk* chunk = &chunks[turn];
    Chunk* next_chunk = &chunks[turn ^ 1];
    next_item = item + chunk->num_heads;
    if (next_item < end) {
      find_chunk(params, next_item, end, *next_chunk);
    } else {
      next_chunk->num_pages = 0;
    }
    if (chunk->num_pages > 0) {
      dispatch_products(params, [&](auto* tag) {
        const int64_t num_blocks = num_head_blocks(params);
        for (int64_t first = 0; first < num_blocks; first += kMaxStreams) {
          const int64_t rest = num_blocks - first;
          attend_chunk<std::remove_pointer_t<decltype(tag)>>(params, *chunk, *next_chunk, first,
                                                             rest < kMaxStreams ? rest : kMaxStreams);
        }
      });
    } else if (chunk->index > 0) {
      continue;
    }
    for (int64_t head = chunk->first_head; head < chunk->first_head + chunk->num_heads; ++head) {
      const int64_t row_head = chunk->row_idx * params.num_kv_heads + head;
      const int64_t num_pages = list_length(params, row_head, params.rows[chunk->row_idx]);
      const int64_t num_chunks = (num_pages + kChunkPages - 1) / kChunkPages;
      if (finishes_list(params, row_head, num_chunks)) merge_chunks(params, row_head, num_chunks);
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
