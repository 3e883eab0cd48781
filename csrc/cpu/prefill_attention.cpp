// Causal attention of a block of new tokens over the stored ones and over themselves: keys and values are
// widened once into an fp32 tile that all queries of the block share, with an online softmax over the tiles.
// Tiles begin at multiples of kPrefillTileTokens, so they do not depend on how a prompt is chunked.

#include "cpu/kernels.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

using core::kMaxHeadDim;
constexpr int64_t kTile = core::kPrefillTileTokens;
constexpr int64_t kQueries = core::kPrefillQueries;

struct Tile {
  alignas(64) float k[kMaxHeadDim * kTile];  // channel-major [head_dim, kTile]
  alignas(64) float v[kTile * kMaxHeadDim];  // [kTile, head_dim]
};

// What the queries of one block and kv head carry from tile to tile.
struct QueryState {
  alignas(64) float q[kQueries * kMaxHeadDim];    // scaled by sm_scale
  alignas(64) float acc[kQueries * kMaxHeadDim];  // sum of exp(logit - max) * v
  alignas(64) float logits[kHeadBlock * kTile];
  float max[kQueries];
  float sum[kQueries];
};

template <typename T>
void widen_keys(const T* token, int64_t token_stride, int64_t channel_stride, int64_t count, int64_t head_dim,
                float* tile) {
  if (channel_stride == 1) {
    float row[kMaxHeadDim];
    for (int64_t t = 0; t < count; ++t) {
      load_row(token + t * token_stride, head_dim, row);
      for (int64_t d = 0; d < head_dim; ++d) tile[d * kTile + t] = row[d];
    }
  } else {
    for (int64_t d = 0; d < head_dim; ++d) {
      const T* channel = token + d * channel_stride;
      for (int64_t t = 0; t < count; ++t) tile[d * kTile + t] = to_float(channel[t]);
    }
  }
}

// Turns the codes of `count` int8 tokens into keys and values; all of them are stored tokens.
void dequantise(const float* k_scales, const float* v_scales, int64_t count, int64_t head_dim, float* k_tile,
                float* v_tile) {
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int64_t t = 0; t < count; ++t) k_tile[d * kTile + t] *= k_scales[t];
  }
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t d = 0; d < head_dim; ++d) v_tile[t * head_dim + d] *= v_scales[t];
  }
}

// Fills the tile with positions [begin, end); logits of the slots behind them are masked by the caller.
void load_tile(const core::PrefillAttentionParams& params, const core::PrefillBlock& block, int64_t head,
               int64_t begin, int64_t end, Tile& tile) {
  const int64_t head_dim = params.head_dim;
  int64_t position = begin;
  while (position < end && position < block.stored) {
    const int64_t slot = position % params.page_size;
    int64_t count = params.page_size - slot;
    if (count > end - position) count = end - position;
    if (count > block.stored - position) count = block.stored - position;
    const int64_t page_id = block.page_table[position / params.page_size];
    const int64_t t = position - begin;
    dispatch_page_element(params.k_pages.type, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      const core::PagePoolView& k = params.k_pages;
      widen_keys(k.page<T>(page_id, head) + slot * k.token_stride, k.token_stride, k.channel_stride, count,
                 head_dim, tile.k + t);
      const T* value = params.v_pages.page<T>(page_id, head) + slot * params.v_pages.token_stride;
      for (int64_t i = 0; i < count; ++i) {
        load_row(value + i * params.v_pages.token_stride, head_dim, tile.v + (t + i) * head_dim);
      }
    });
    if (params.k_pages.scales != nullptr) {
      dequantise(params.k_pages.token_scales(page_id, head) + slot,
                 params.v_pages.token_scales(page_id, head) + slot, count, head_dim, tile.k + t,
                 tile.v + t * head_dim);
    }
    position += count;
  }
  for (; position < end; ++position) {
    const int64_t row = block.first_new_row + position - block.stored;
    const int64_t t = position - begin;
    float key[kMaxHeadDim];
    load_row(params.k.data, params.k.type, row * params.k.token_stride + head * params.k.head_stride,
             head_dim, key);
    for (int64_t d = 0; d < head_dim; ++d) tile.k[d * kTile + t] = key[d];
    load_row(params.v.data, params.v.type, row * params.v.token_stride + head * params.v.head_stride,
             head_dim, tile.v + t * head_dim);
  }
  const int64_t filled = end - begin;
  for (int64_t d = 0; d < head_dim && filled < kTile; ++d) {
    __builtin_memset(tile.k + d * kTile + filled, 0, static_cast<size_t>(kTile - filled) * sizeof(float));
  }
}

struct SlotRange {
  int64_t begin;
  int64_t end;
};

// The slots of a tile that one query sees.
SlotRange seen_slots(const core::PrefillAttentionParams& params, const core::PrefillBlock& block,
                     int64_t query, int64_t tile_begin, int64_t num_tokens) {
  const int64_t end = block.first_position + query / params.group_size + 1 - tile_begin;
  const int64_t begin = params.window > 0 && end > params.window ? end - params.window : 0;
  return {begin, end < num_tokens ? end : num_tokens};
}

// Adds a tile of `num_tokens` tokens from position `tile_begin` on to kHeads queries, the first of which is
// `query`. Queries of one row are neighbours, so later queries see no less and begin no earlier.
template <int kHeads>
void attend_tile(const core::PrefillAttentionParams& params, const core::PrefillBlock& block,
                 const Tile& tile, int64_t tile_begin, int64_t num_tokens, int64_t query, QueryState& state) {
  const int64_t head_dim = params.head_dim;
  const SlotRange first = seen_slots(params, block, query, tile_begin, num_tokens);
  const SlotRange last = seen_slots(params, block, query + kHeads - 1, tile_begin, num_tokens);
  if (first.begin >= last.end) return;

  const int64_t num_slots = round_up(last.end);
  channel_major_logits<kHeads>(state.q + query * head_dim, tile.k, NothingAhead{}, kTile, num_slots, head_dim,
                               state.logits, kTile);
  for (int g = 0; g < kHeads; ++g) {
    float* logits = state.logits + g * kTile;
    const SlotRange seen = seen_slots(params, block, query + g, tile_begin, num_tokens);
    for (int64_t t = 0; t < seen.begin && t < num_slots; ++t) logits[t] = kMinusInfinity;
    for (int64_t t = seen.end > 0 ? seen.end : 0; t < num_slots; ++t) logits[t] = kMinusInfinity;
    float* acc = state.acc + (query + g) * head_dim;
    const float old_max = state.max[query + g];
    const float tile_max = maximum(logits, num_slots);
    const float new_max = tile_max > old_max ? tile_max : old_max;
    if (new_max != old_max && old_max != kMinusInfinity) {
      const float rescale = exp_nonpositive(old_max - new_max);
      state.sum[query + g] *= rescale;
      for (int64_t d = 0; d < head_dim; d += kLanes) store(acc + d, load(acc + d) * splat(rescale));
    }
    state.max[query + g] = new_max;
    state.sum[query + g] += softmax_numerators(logits, num_slots, new_max);
  }

  // Values only of slots a query sees: a probability of 0 would not silence a NaN. All queries share
  // [last.begin, first.end); at the edges of the mask each adds its own rest.
  float* acc = state.acc + query * head_dim;
  const bool share = last.begin < first.end;
  if (share) {
    accumulate_values<kHeads>(state.logits, kTile, tile.v, NothingAhead{}, head_dim, last.begin, first.end,
                              head_dim, acc);
  }
  if (first.begin == last.begin && first.end == last.end) return;
  for (int g = 0; g < kHeads; ++g) {
    const SlotRange seen = seen_slots(params, block, query + g, tile_begin, num_tokens);
    const auto add = [&](int64_t begin, int64_t end) {
      accumulate_values<1>(state.logits + g * kTile, kTile, tile.v, NothingAhead{}, head_dim, begin, end,
                           head_dim, acc + g * head_dim);
    };
    add(seen.begin, share ? last.begin : seen.end);
    if (share) add(first.end, seen.end);
  }
}

void attend_block(const core::PrefillAttentionParams& params, const core::PrefillBlock& block, int64_t head,
                  Tile& tile, QueryState& state) {
  const int64_t head_dim = params.head_dim;
  const int64_t num_queries = block.num_rows * params.group_size;
  const int64_t num_heads = params.num_kv_heads * params.group_size;
  for (int64_t query = 0; query < num_queries; ++query) {
    const int64_t row = block.first_row + query / params.group_size;
    const int64_t query_head = head * params.group_size + query % params.group_size;
    load_query(params.q, row, query_head, head_dim, params.sm_scale, state.q + query * head_dim);
    state.max[query] = kMinusInfinity;
    state.sum[query] = 0.0F;
  }
  __builtin_memset(state.acc, 0, static_cast<size_t>(num_queries * head_dim) * sizeof(float));

  const int64_t end_position = block.first_position + block.num_rows;
  int64_t first_key = params.window > 0 ? block.first_position + 1 - params.window : 0;
  if (first_key < 0) first_key = 0;
  for (int64_t begin = first_key / kTile * kTile; begin < end_position; begin += kTile) {
    const int64_t end = begin + kTile < end_position ? begin + kTile : end_position;
    // Positions before the window may have lost their pages: the tile starts at the first one in sight.
    const int64_t load_begin = begin > first_key ? begin : first_key;
    load_tile(params, block, head, load_begin, end, tile);
    for_each_head_block(num_queries, [&](int64_t query, auto heads) {
      attend_tile<decltype(heads)::value>(params, block, tile, load_begin, end - load_begin, query, state);
    });
  }

  for (int64_t query = 0; query < num_queries; ++query) {
    const int64_t row = block.first_row + query / params.group_size;
    const int64_t result = row * num_heads + head * params.group_size + query % params.group_size;
    const float sum = state.sum[query];
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
    dispatch_element(params.q.type, [&](auto* tag) {
      auto* out = static_cast<decltype(tag)>(params.out) + result * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) from_float(state.acc[query * head_dim + d] * inverse, out[d]);
    });
    const float shift = state.max[query] == kMinusInfinity ? 0.0F : state.max[query];
    params.lse[result] = sum == 0.0F ? kMinusInfinity : shift + __builtin_logf(sum);
  }
}

}  // namespace

void prefill_attention(const core::PrefillAttentionParams& params, int64_t begin, int64_t end) {
  Tile tile;
  QueryState state;
  for (int64_t item = begin; item < end; ++item) {
    attend_block(params, params.blocks[item / params.num_kv_heads], item % params.num_kv_heads, tile, state);
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
