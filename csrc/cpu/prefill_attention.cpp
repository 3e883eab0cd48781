// Causal attention of a block of new tokens over the stored ones and over themselves: keys and values are
// made into a tile once that all queries of the block share, with an online softmax over the tiles.
// Tiles begin at multiples of kPrefillTileTokens, so they do not depend on how a prompt is chunked.

#include "cpu/bf16_prefill_tile.h"
#include "cpu/kernels.h"
#include "cpu/prefill_tile.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

constexpr int64_t kQueries = core::kPrefillQueries;

// What the queries of one block and kv head carry from tile to tile.
struct QueryState {
  alignas(64) float acc[kQueries * core::kMaxHeadDim];  // sum of weight * v, weight = exp(logit - max)
  alignas(64) float logits[kHeadBlock * kTile];
  float max[kQueries];
  WeightSums sum[kQueries];
};

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
template <int kHeads, typename Tile>
void attend_tile(const core::PrefillAttentionParams& params, const core::PrefillBlock& block, Tile& tile,
                 int64_t tile_begin, int64_t num_tokens, int64_t query, QueryState& state) {
  const int64_t head_dim = params.head_dim;
  const SlotRange first = seen_slots(params, block, query, tile_begin, num_tokens);
  const SlotRange last = seen_slots(params, block, query + kHeads - 1, tile_begin, num_tokens);
  if (first.begin >= last.end) return;

  const int64_t num_slots = round_up(last.end);
  tile.template logits<kHeads>(params, query, num_slots, state.logits);
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
      state.sum[query + g].exact *= rescale;
      state.sum[query + g].rounded *= rescale;
      for (int64_t d = 0; d < head_dim; d += kLanes) store(acc + d, load(acc + d) * splat(rescale));
    }
    state.max[query + g] = new_max;
    const WeightSums sum = tile.take_weights(g, logits, num_slots, new_max);
    state.sum[query + g].exact += sum.exact;
    state.sum[query + g].rounded += sum.rounded;
  }

  // Values only of slots a query sees: a probability of 0 would not silence a NaN. All queries share
  // [last.begin, first.end); at the edges of the mask each adds its own rest.
  float* acc = state.acc + query * head_dim;
  const bool share = last.begin < first.end;
  if (share) {
    tile.template add_values<kHeads>(0, last.begin, first.end, head_dim, acc);
  }
  if (first.begin == last.begin && first.end == last.end) return;
  for (int g = 0; g < kHeads; ++g) {
    const SlotRange seen = seen_slots(params, block, query + g, tile_begin, num_tokens);
    const auto add = [&](int64_t begin, int64_t end) {
      tile.template add_values<1>(g, begin, end, head_dim, acc + g * head_dim);
    };
    add(seen.begin, share ? last.begin : seen.end);
    if (share) add(first.end, seen.end);
  }
}

template <typename Tile>
void attend_block(const core::PrefillAttentionParams& params, const core::PrefillBlock& block, int64_t head,
                  Tile& tile, QueryState& state) {
  const int64_t head_dim = params.head_dim;
  const int64_t num_queries = block.num_rows * params.group_size;
  const int64_t num_heads = params.num_kv_heads * params.group_size;
  for (int64_t query = 0; query < num_queries; ++query) {
    const int64_t row = block.first_row + query / params.group_size;
    const int64_t query_head = head * params.group_size + query % params.group_size;
    tile.load_query(params, row, query_head, query);
    state.max[query] = kMinusInfinity;
    state.sum[query] = {};
  }
  __builtin_memset(state.acc, 0, static_cast<size_t>(num_queries * head_dim) * sizeof(float));

  const int64_t end_position = block.first_position + block.num_rows;
  int64_t first_key = params.window > 0 ? block.first_position + 1 - params.window : 0;
  if (first_key < 0) first_key = 0;
  for (int64_t begin = first_key / kTile * kTile; begin < end_position; begin += kTile) {
    const int64_t end = begin + kTile < end_position ? begin + kTile : end_position;
    // Positions before the window may have lost their pages: the tile starts at the first one in sight.
    const int64_t load_begin = begin > first_key ? begin : first_key;
    tile.load(params, block, head, load_begin, end);
    for_each_head_block(num_queries, [&](int64_t query, auto heads) {
      attend_tile<decltype(heads)::value>(params, block, tile, load_begin, end - load_begin, query, state);
    });
  }

  for (int64_t query = 0; query < num_queries; ++query) {
    const int64_t row = block.first_row + query / params.group_size;
    const int64_t result = row * num_heads + head * params.group_size + query % params.group_size;
    // Rounded weights are divided by their own sum, so that they add up to 1.
    const float sum = state.sum[query].exact;
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / state.sum[query].rounded;
    dispatch_element(params.q.type, [&](auto* tag) {
      auto* out = static_cast<decltype(tag)>(params.out) + result * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) from_float(state.acc[query * head_dim + d] * inverse, out[d]);
    });
    const float shift = state.max[query] == kMinusInfinity ? 0.0F : state.max[query];
    params.lse[result] = sum == 0.0F ? kMinusInfinity : shift + __builtin_logf(sum);
  }
}

template <typename Tile>
void attend_blocks(const core::PrefillAttentionParams& params, int64_t begin, int64_t end) {
  Tile tile;
  QueryState state;
  for (int64_t item = begin; item < end; ++item) {
    attend_block(params, params.blocks[item / params.num_kv_heads], item % params.num_kv_heads, tile, state);
  }
}

}  // namespace

void prefill_attention(const core::PrefillAttentionParams& params, int64_t begin, int64_t end) {
#if defined(__AVX512BF16__)
  if (BFloat16Tile::serves(params)) return attend_blocks<BFloat16Tile>(params, begin, end);
#endif
  attend_blocks<FloatTile>(params, begin, end);
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
