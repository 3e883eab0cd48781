// Attention of one query row over a list of pages. A block takes one chunk of the list for one kv head and up
// to kHeads of its query heads; its warps take the chunk's pages in turns and work on their own, each with a
// ring of tiles in shared memory and a running softmax. The block joins its warps, and the last block of a
// row and kv head joins the chunks; both in index order, so that no bit depends on who was first.
//
// Tokens that the row does not see are never read: their keys and values are zeros in shared memory, their
// logits -inf.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/limits.h"
#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_chunks.h"
#include "cuda/element.cuh"
#include "cuda/row.cuh"
#include "cuda/vector_load.cuh"

namespace tinyserve::cuda {

inline constexpr int kAttendStages = 2;  // of a warp's ring
inline constexpr int kTokenLanes = 4;    // lanes that share the dot products of a token

// How rows of K and V come into shared memory, as the pool's alignment allows.
enum class CopyUnit : int { kBytes16, kBytes8, kElement };

struct CopyUnits {
  CopyUnit k;  // kElement where keys are channel-major: they are transposed on the way
  CopyUnit v;
};

template <typename T_, int kHeads_, int kHeadDim_>
struct AttendTraits {
  using T = T_;                               // of the pages
  static constexpr int kHeads = kHeads_;      // query heads of a block
  static constexpr int kHeadDim = kHeadDim_;  // 0: known at run time
  static constexpr int kMaxHeadDim = kHeadDim == 0 ? static_cast<int>(core::kMaxHeadDim) : kHeadDim;
  static constexpr bool kInt8 = std::is_same_v<T, int8_t>;

  // Of the output a lane has kSlices times kChannels neighbouring channels.
  static constexpr int kChannels = kHeadDim == 64 ? 2 : 4;
  static constexpr int kSlices = kMaxHeadDim / (kChannels * kWarpSize);
  // Of the logits of its tokens a lane ends with those of so many heads.
  static constexpr int kLaneHeads = kHeads == 1 ? 1 : kHeads / kTokenLanes;

  // Blocks of an SM that registers must leave room for; shared memory leaves none for more. Left to itself
  // the compiler makes room for others and spills.
  static constexpr int kMinBlocks = kHeadDim == 0 ? 2 : 3;

  static_assert(kHeads == 1 || kHeads % kTokenLanes == 0, "The lanes of a token share its heads evenly.");
  static_assert(kSlices * kChannels * kWarpSize == kMaxHeadDim, "The lanes cover the channels exactly.");
  static_assert(core::kHeadDimMultiple % kChannels == 0,
                "A lane's neighbouring channels are all there or none.");
};

// Shared memory of a block: the queries, the states of the warps, then for each warp its ring and what its
// lanes tell each other. A row of keys is longer than head_dim, so that lanes at neighbouring tokens meet
// other banks.
template <typename Traits>
struct AttendLayout {
  int head_dim;
  int num_warps;

  static constexpr int kElement = static_cast<int>(sizeof(typename Traits::T));
  static constexpr int kTokens = kAttendTileTokens;

  constexpr int k_pitch() const { return head_dim + 8 * kTokenLanes; }  // elements

  // Within a stage.
  constexpr int values() const { return kTokens * k_pitch() * kElement; }
  constexpr int scales() const { return values() + kTokens * head_dim * kElement; }
  constexpr int stage_bytes() const {
    return scales() + (Traits::kInt8 ? 2 * kTokens * static_cast<int>(sizeof(float)) : 0);
  }
  // Within a warp's part.
  constexpr int rows() const { return kAttendStages * stage_bytes(); }  // int64 [2][kTokens]
  constexpr int numerators() const { return rows() + 2 * kTokens * static_cast<int>(sizeof(int64_t)); }
  constexpr int rescales() const {  // after float [kTokens][kHeads]
    return numerators() + kTokens * Traits::kHeads * static_cast<int>(sizeof(float));
  }
  constexpr int warp_bytes() const {
    return rescales() + (Traits::kHeads + 3) / 4 * 4 * static_cast<int>(sizeof(float));
  }
  // Within the block. States: float [3][num_warps][kHeads], maximum, sum and weight.
  constexpr int queries() const { return 16; }  // after the flag
  constexpr int states() const {
    return queries() + Traits::kHeads * head_dim * static_cast<int>(sizeof(float));
  }
  constexpr int warps() const {
    return (states() + 3 * num_warps * Traits::kHeads * static_cast<int>(sizeof(float)) + 127) / 128 * 128;
  }
  constexpr int bytes() const { return warps() + num_warps * warp_bytes(); }
};

// Bytes of shared memory that the last block takes to join the chunks of `group_size` heads.
constexpr int merge_bytes(int group_size) {
  return 16 + group_size * (static_cast<int>(kMaxChunks) + 1) * static_cast<int>(sizeof(float));
}

// What a block does.
struct AttendWork {
  int64_t row_idx;
  int64_t row_head;  // row_idx * num_kv_heads + head
  int head;
  int first_query_head;  // of the group
  int chunk;
  int first_entry;  // of the row's list
  int num_pages;    // of the chunk; 0: nothing to do
  int num_chunks;
  const int32_t* list;  // null: the visible pages from first_page on
  int first_page;
  int first_token;
  int num_tokens;
  const int32_t* page_table;
};

__device__ __forceinline__ AttendWork find_work(const core::AttendPagesBatchParams& params, int heads) {
  const core::AttendPagesParams& attend = params.attend;
  const auto page_size = static_cast<unsigned>(attend.page_size);
  const auto num_kv_heads = static_cast<unsigned>(attend.num_kv_heads);
  const unsigned head_blocks = (static_cast<unsigned>(attend.group_size) + heads - 1) / heads;
  AttendWork work = {};
  // Blocks that read the same pages are neighbours, then those that read neighbouring memory.
  unsigned item = blockIdx.x;
  work.first_query_head = static_cast<int>(item % head_blocks * heads);
  item /= head_blocks;
  work.head = static_cast<int>(item % num_kv_heads);
  item /= num_kv_heads;
  work.chunk = static_cast<int>(item % static_cast<unsigned>(attend.max_chunks));
  work.row_idx = item / static_cast<unsigned>(attend.max_chunks);
  work.row_head = work.row_idx * num_kv_heads + work.head;

  const core::Row row = row_of(params.batch, work.row_idx, params.attend.page_size, params.window);
  work.page_table = row.page_table;
  work.first_token = static_cast<int>(row.first_token);
  work.num_tokens = static_cast<int>(row.num_tokens);
  work.first_page = static_cast<int>(static_cast<unsigned>(work.first_token) / page_size);
  if (work.num_tokens == 0) return work;
  int list_len;
  if (attend.selected_pages != nullptr) {
    work.list = attend.selected_pages + work.row_head * attend.list_width;
    // Nobody has looked at the lists; scratch is there for as many pages as they can hold.
    list_len = min(max(attend.num_selected[work.row_head], 0), static_cast<int>(attend.list_width));
  } else {
    list_len = static_cast<int>((static_cast<unsigned>(work.num_tokens) + page_size - 1) / page_size) -
               work.first_page;
  }
  const auto pages_of_chunk = static_cast<int>(chunk_pages(list_len, page_size));
  work.num_chunks = static_cast<int>(ceil_div(list_len, pages_of_chunk));
  work.first_entry = work.chunk * pages_of_chunk;
  work.num_pages = min(max(list_len - work.first_entry, 0), pages_of_chunk);
  return work;
}

// Where a warp stands in its chunk. A tile holds whole pages where several fit into it, else a piece of one
// page; a page stays in one warp, which can take its log-sum-exp.
struct Tile {
  int entry;       // of the chunk: the tile's first page
  int first_slot;  // of that page
};

struct TileSteps {
  int pages;       // of a tile, at least 1
  int entry_step;  // to the warp's next pages
  int page_size;

  __device__ __forceinline__ void advance(Tile& tile) const {
    tile.first_slot += kAttendTileTokens;
    if (tile.first_slot >= page_size) {
      tile.first_slot = 0;
      tile.entry += entry_step;
    }
  }
};

// A lane's token in a tile (lanes l and l + 16 have the same one).
struct TokenPlace {
  int page_id = -1;  // -1: not seen
  int slot = 0;
};

__device__ __forceinline__ TokenPlace find_token(const core::AttendPagesBatchParams& params,
                                                 const AttendWork& work, const TileSteps& steps,
                                                 const Tile& tile, int page_of_tile, int slot_of_page) {
  TokenPlace place;
  const int entry = tile.entry + page_of_tile;
  place.slot = tile.first_slot + slot_of_page;
  if (page_of_tile >= steps.pages || place.slot >= steps.page_size || entry >= work.num_pages) return place;
  const int list_entry = work.first_entry + entry;
  const int page = work.list != nullptr ? work.list[list_entry] : work.first_page + list_entry;
  const int token = page * steps.page_size + place.slot;
  if (page < 0 || page >= params.batch.max_pages || token < work.first_token || token >= work.num_tokens)
    return place;
  place.page_id = work.page_table[page];
  return place;
}

// Copies the rows of a tile, `row_bytes` each, to rows `pitch` bytes apart. rows: bytes from the begin of the
// pool, or -1 for a row of zeros.
template <int kUnit>
__device__ __forceinline__ void copy_rows(unsigned char* to, int pitch, const unsigned char* pool,
                                          const int64_t* rows, int row_bytes) {
  const int units = row_bytes / kUnit;
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < kAttendTileTokens * units; i += kWarpSize) {
    const int token = i / units;
    const int from = i % units * kUnit;
    const bool seen = rows[token] >= 0;
    cp_async<kUnit>(to + token * pitch + from, pool + (seen ? rows[token] : 0) + from, seen ? kUnit : 0);
  }
}

// The same element by element, for channels that lie apart and for rows that are not aligned.
template <typename T>
__device__ __forceinline__ void copy_elements(unsigned char* to, int pitch, const unsigned char* pool,
                                              const int64_t* rows, int head_dim, int64_t channel_stride) {
  using Bits =
      std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < kAttendTileTokens * head_dim; i += kWarpSize) {
    const int token = i % kAttendTileTokens;
    const int d = i / kAttendTileTokens;
    Bits bits = 0;
    if (rows[token] >= 0) bits = reinterpret_cast<const Bits*>(pool + rows[token])[d * channel_stride];
    reinterpret_cast<Bits*>(to + token * pitch)[d] = bits;
  }
}

template <typename T>
__device__ __forceinline__ void copy_tile(CopyUnit unit, unsigned char* to, int pitch,
                                          const core::PagePoolView& pool, const int64_t* rows, int head_dim) {
  const auto* begin = static_cast<const unsigned char*>(pool.data);
  const int row_bytes = head_dim * static_cast<int>(sizeof(T));
  switch (unit) {
    case CopyUnit::kBytes16:
      return copy_rows<16>(to, pitch, begin, rows, row_bytes);
    case CopyUnit::kBytes8:
      return copy_rows<8>(to, pitch, begin, rows, row_bytes);
    case CopyUnit::kElement:
      return copy_elements<T>(to, pitch, begin, rows, head_dim, pool.channel_stride);
  }
}

// Starts the copies of a tile into a stage; returns which of its tokens are seen, one bit each.
template <typename Traits>
__device__ __forceinline__ unsigned load_tile(const core::AttendPagesParams& attend, const AttendWork& work,
                                              CopyUnits units, const AttendLayout<Traits>& layout,
                                              unsigned char* stage, int64_t* rows, const TokenPlace& place) {
  using T = typename Traits::T;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const bool seen = place.page_id >= 0;
  const core::PagePoolView& pool = lane < kAttendTileTokens ? attend.k_pages : attend.v_pages;
  __syncwarp();  // the stage and `rows` are not read any more
  rows[lane] = !seen ? -1
                     : (place.page_id * pool.page_stride + work.head * pool.head_stride +
                        place.slot * pool.token_stride) *
                           static_cast<int64_t>(sizeof(T));
  __syncwarp();
  copy_tile<T>(units.k, stage, layout.k_pitch() * static_cast<int>(sizeof(T)), attend.k_pages, rows,
               layout.head_dim);
  copy_tile<T>(units.v, stage + layout.values(), layout.head_dim * static_cast<int>(sizeof(T)),
               attend.v_pages, rows + kAttendTileTokens, layout.head_dim);
  if constexpr (Traits::kInt8) {
    auto* scales = reinterpret_cast<float*>(stage + layout.scales());
    const float* from = seen ? pool.token_scales(place.page_id, work.head) + place.slot : pool.scales;
    cp_async<4>(scales + lane, from, seen ? 4 : 0);
  }
  cp_async_commit();
  return __ballot_sync(kFullWarp, seen) & ((1U << kAttendTileTokens) - 1);
}

// Adds up `x` over the lanes of a token; each lane ends with its share of the heads, the one of number
// lane % kTokenLanes * kLaneHeads first.
template <int kHeads>
__device__ __forceinline__ void share_heads(float (&x)[kHeads]) {
  static_assert(kTokenLanes == 4, "Two exchanges join four lanes.");
  const unsigned lane = threadIdx.x % kWarpSize;
  if constexpr (kHeads == 1) {
    x[0] += __shfl_xor_sync(kFullWarp, x[0], 2);
    x[0] += __shfl_xor_sync(kFullWarp, x[0], 1);
  } else {
    const bool second_half = (lane & 2U) != 0;
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) {
      const float given = second_half ? x[i] : x[i + kHeads / 2];
      const float kept = second_half ? x[i + kHeads / 2] : x[i];
      x[i] = kept + __shfl_xor_sync(kFullWarp, given, 2);
    }
    const bool second_quarter = (lane & 1U) != 0;
#pragma unroll
    for (int i = 0; i < kHeads / 4; ++i) {
      const float given = second_quarter ? x[i] : x[i + kHeads / 4];
      const float kept = second_quarter ? x[i + kHeads / 4] : x[i];
      x[i] = kept + __shfl_xor_sync(kFullWarp, given, 1);
    }
  }
}

// The largest of the tokens' values, NaN aside, and their sum: over the lanes that hold the same heads.
__device__ __forceinline__ float max_over_tokens(float x) {
#pragma unroll
  for (int step = kTokenLanes; step < kWarpSize; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}
__device__ __forceinline__ float sum_over_tokens(float x) {
#pragma unroll
  for (int step = kTokenLanes; step < kWarpSize; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// What numerators are taken relative to: 0 where no logit is finite, so that exp gives 0 and not NaN.
__device__ __forceinline__ float shift_of(float max) { return max == -INFINITY ? 0.0F : max; }

// The factor that brings numerators relative to `max` to those relative to `shift`. A NaN sum counts whatever
// its max.
__device__ __forceinline__ float weight_of(float max, float sum, float shift) {
  return sum == 0.0F ? 0.0F : __expf(shift_of(max) - shift);
}

__device__ __forceinline__ float log_sum_exp(float max, float sum) {
  return sum == 0.0F ? -INFINITY : shift_of(max) + logf(sum);
}

// dots[i][h]: of tokens lane / kTokenLanes and the one 8 behind with every head, then the lane's share of
// them.
template <typename Traits>
__device__ __forceinline__ void tile_logits(const AttendLayout<Traits>& layout,
                                            const typename Traits::T* keys, const float* queries,
                                            float (&dots)[2][Traits::kHeads]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int part = lane % kTokenLanes;
  const auto* first = keys + lane / kTokenLanes * layout.k_pitch();
  const auto* second = first + kAttendTileTokens / 2 * layout.k_pitch();
#pragma unroll
  for (int h = 0; h < Traits::kHeads; ++h) dots[0][h] = dots[1][h] = 0.0F;
  constexpr int kSteps = Traits::kMaxHeadDim / (8 * kTokenLanes);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int d = 8 * (step * kTokenLanes + part);
    if (Traits::kHeadDim == 0 && d >= layout.head_dim) break;
    float k[2][8];
    load_vector(first + d, k[0]);
    load_vector(second + d, k[1]);
#pragma unroll
    for (int h = 0; h < Traits::kHeads; ++h) {
      float q[8];
      load_vector(queries + h * layout.head_dim + d, q);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        dots[0][h] = fmaf(q[i], k[0][i], dots[0][h]);
        dots[1][h] = fmaf(q[i], k[1][i], dots[1][h]);
      }
    }
  }
  share_heads(dots[0]);
  share_heads(dots[1]);
}

// The log-sum-exp of each page of a tile and head, from the logits [kTokens][kHeads] in `logits`. A page in
// several tiles is carried by the lane of its head.
struct PageLse {
  float max = -INFINITY;
  float sum = 0.0F;
};
template <typename Traits>
__device__ __forceinline__ void write_page_lse(const core::AttendPagesParams& attend, const AttendWork& work,
                                               const TileSteps& steps, const Tile& tile, const float* logits,
                                               PageLse& carried) {
  const int num_heads = min(Traits::kHeads, static_cast<int>(attend.group_size) - work.first_query_head);
  const int num_pages = min(steps.pages, work.num_pages - tile.entry);
  const int tokens = min(steps.page_size - tile.first_slot, kAttendTileTokens);
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < num_pages * num_heads; i += kWarpSize) {
    const int page = i / num_heads;
    const int h = i % num_heads;
    const float* page_logits = logits + page * steps.page_size * Traits::kHeads + h;
    PageLse lse = tile.first_slot == 0 ? PageLse{} : carried;
    const float max_before = lse.max;
    for (int t = 0; t < tokens; ++t) lse.max = fmaxf(lse.max, page_logits[t * Traits::kHeads]);
    lse.sum *= weight_of(max_before, lse.sum, shift_of(lse.max));
    for (int t = 0; t < tokens; ++t) lse.sum += __expf(page_logits[t * Traits::kHeads] - shift_of(lse.max));
    carried = lse;
    if (tile.first_slot + tokens < steps.page_size) continue;
    const int64_t query_head = work.row_head * attend.group_size + work.first_query_head + h;
    attend.page_lse[query_head * attend.list_width + work.first_entry + tile.entry + page] =
        log_sum_exp(lse.max, lse.sum);
  }
}

// The running softmax of a warp. acc, relative to max, is spread over all lanes by channels; max and sum over
// the lanes of its tokens by heads, where each lane has summed its own tokens only.
template <typename Traits>
struct SoftmaxState {
  float acc[Traits::kHeads][Traits::kSlices][Traits::kChannels] = {};
  float max[Traits::kLaneHeads];
  float sum[Traits::kLaneHeads];
};

// Brings acc to the new maxima, if there are any, and adds the tile's values.
template <typename Traits>
__device__ __forceinline__ void add_values(const AttendLayout<Traits>& layout,
                                           const typename Traits::T* values, const float* numerators,
                                           const float* rescales, bool rescale, SoftmaxState<Traits>& state) {
  constexpr int kHeads = Traits::kHeads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (rescale) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float factor = rescales[h];
#pragma unroll
      for (int s = 0; s < Traits::kSlices; ++s) {
#pragma unroll
        for (int i = 0; i < Traits::kChannels; ++i) state.acc[h][s][i] *= factor;
      }
    }
  }
#pragma unroll 4
  for (int t = 0; t < kAttendTileTokens; ++t) {
    float p[kHeads];
    load_vector(numerators + t * kHeads, p);
#pragma unroll
    for (int s = 0; s < Traits::kSlices; ++s) {
      const int d = (s * kWarpSize + lane) * Traits::kChannels;
      if (Traits::kHeadDim == 0 && d >= layout.head_dim) continue;
      float v[Traits::kChannels];
      load_vector(values + t * layout.head_dim + d, v);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < Traits::kChannels; ++i) state.acc[h][s][i] = fmaf(p[h], v[i], state.acc[h][s][i]);
      }
    }
  }
}

// Writes what the block's warps have found, joined, as the partial result of the chunk: acc [group_size,
// head_dim], max [group_size], sum [group_size].
__device__ __forceinline__ float* partial_of(const core::AttendPagesParams& attend, int64_t row_head,
                                             int64_t chunk) {
  return attend.partials + (row_head * attend.max_chunks + chunk) * attend.group_size * (attend.head_dim + 2);
}

template <typename Traits>
__device__ __forceinline__ void join_warps(const core::AttendPagesParams& attend, const AttendWork& work,
                                           const AttendLayout<Traits>& layout, unsigned char* shared) {
  constexpr int kHeads = Traits::kHeads;
  const int num_heads = min(kHeads, static_cast<int>(attend.group_size) - work.first_query_head);
  const int head_dim = layout.head_dim;
  auto* maxima = reinterpret_cast<float*>(shared + layout.states());
  float* sums = maxima + layout.num_warps * kHeads;
  float* weights = sums + layout.num_warps * kHeads;
  float* partial = partial_of(attend, work.row_head, work.chunk);
  if (static_cast<int>(threadIdx.x) < num_heads) {
    const int h = static_cast<int>(threadIdx.x);
    float max = -INFINITY;
    for (int w = 0; w < layout.num_warps; ++w) max = fmaxf(max, maxima[w * kHeads + h]);
    float sum = 0.0F;
    for (int w = 0; w < layout.num_warps; ++w) {
      const int i = w * kHeads + h;
      weights[i] = weight_of(maxima[i], sums[i], shift_of(max));
      sum += weights[i] * sums[i];
    }
    float* chunk_maxima = partial + attend.group_size * head_dim + work.first_query_head;
    chunk_maxima[h] = max;
    chunk_maxima[attend.group_size + h] = sum;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_heads * head_dim; i += static_cast<int>(blockDim.x)) {
    float acc = 0.0F;
    for (int w = 0; w < layout.num_warps; ++w) {
      const auto* warp_acc =
          reinterpret_cast<const float*>(shared + layout.warps() + w * layout.warp_bytes());
      acc = fmaf(weights[w * kHeads + i / head_dim], warp_acc[i], acc);
    }
    partial[work.first_query_head * head_dim + i] = acc;
  }
}

__device__ __forceinline__ void store_output(const core::AttendPagesParams& attend, int64_t index, float x) {
  switch (attend.q.type) {
    case core::ElementType::kFloat16:
      return from_float(x, static_cast<__half*>(attend.out)[index]);
    case core::ElementType::kBFloat16:
      return from_float(x, static_cast<__nv_bfloat16*>(attend.out)[index]);
    default:
      return from_float(x, static_cast<float*>(attend.out)[index]);
  }
}

// The result of a row and kv head from the partial results of its chunks; without one, zeros and -inf.
// `shared`: merge_bytes() of it.
__device__ __forceinline__ void join_chunks(const core::AttendPagesParams& attend, int64_t row_head,
                                            int num_chunks, int head_dim, unsigned char* shared) {
  const int group_size = static_cast<int>(attend.group_size);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  const float* partials = partial_of(attend, row_head, 0);
  const int64_t stride = attend.group_size * (attend.head_dim + 2);
  auto* weights = reinterpret_cast<float*>(shared + 16);  // [group_size][kMaxChunks]
  float* inverses = weights + group_size * kMaxChunks;
  for (int g = warp; g < group_size; g += num_warps) {
    constexpr int kPerLane = static_cast<int>(kMaxChunks) / kWarpSize;
    float maxima[kPerLane];
    float sums[kPerLane];
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int chunk = i * kWarpSize + lane;
      const bool there = chunk < num_chunks;
      const float* state = partials + chunk * stride + group_size * head_dim + g;
      maxima[i] = there ? state[0] : -INFINITY;
      sums[i] = there ? state[group_size] : 0.0F;
      max = fmaxf(max, maxima[i]);
    }
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float weight = weight_of(maxima[i], sums[i], shift_of(max));
      sum += weight * sums[i];
      weights[g * kMaxChunks + i * kWarpSize + lane] = weight;
    }
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0) {
      inverses[g] = sum == 0.0F ? 0.0F : 1.0F / sum;
      attend.lse[row_head * group_size + g] = log_sum_exp(max, sum);
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < group_size * head_dim; i += static_cast<int>(blockDim.x)) {
    const int g = i / head_dim;
    float merged = 0.0F;
#pragma unroll 8
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      merged = fmaf(weights[g * kMaxChunks + chunk], partials[chunk * stride + i], merged);
    }
    store_output(attend, row_head * group_size * head_dim + i, merged * inverses[g]);
  }
}

// Whether this block is the last of its row and kv head; all threads get the answer. The counter makes the
// partial results of the others visible, and is left at zero for the next launch.
__device__ __forceinline__ bool is_last(const core::AttendPagesParams& attend, int64_t row_head,
                                        unsigned num_blocks, unsigned char* shared) {
  auto* last = reinterpret_cast<int*>(shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* counter = attend.chunks_done + row_head;
    *last = num_blocks == 1 || fetch_add_acq_rel(reinterpret_cast<uint32_t*>(counter), 1) == num_blocks - 1;
    if (*last != 0 && num_blocks != 1) *counter = 0;
  }
  __syncthreads();
  return *last != 0;
}

// Grid: blocks of query heads x num_kv_heads x max_chunks x num_rows, the first the fastest, along x.
template <typename Traits>
__global__ void __launch_bounds__(kAttendWarps* kWarpSize, Traits::kMinBlocks)
    attend_pages_kernel(const __grid_constant__ core::AttendPagesBatchParams params, const CopyUnits units) {
  using T = typename Traits::T;
  constexpr int kHeads = Traits::kHeads;
  TINYSERVE_DYNAMIC_SHARED(shared);
  wait_for_previous_kernel();
  let_next_kernel_begin();
  const core::AttendPagesParams& attend = params.attend;
  const AttendWork work = find_work(params, kHeads);
  const int head_dim = Traits::kHeadDim == 0 ? static_cast<int>(attend.head_dim) : Traits::kHeadDim;
  if (work.num_pages == 0) {
    if (work.num_chunks == 0 && work.chunk == 0 && work.first_query_head == 0) {
      join_chunks(attend, work.row_head, 0, head_dim, shared);
    }
    return;
  }
  const AttendLayout<Traits> layout{head_dim, static_cast<int>(blockDim.x) / kWarpSize};
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  unsigned char* mine = shared + layout.warps() + warp * layout.warp_bytes();
  auto* rows = reinterpret_cast<int64_t*>(mine + layout.rows());
  auto* numerators = reinterpret_cast<float*>(mine + layout.numerators());
  auto* rescales = reinterpret_cast<float*>(mine + layout.rescales());
  auto* queries = reinterpret_cast<float*>(shared + layout.queries());

  const auto page_size = static_cast<int>(attend.page_size);
  const int pages = max(kAttendTileTokens / page_size, 1);
  const TileSteps steps{.pages = pages, .entry_step = layout.num_warps * pages, .page_size = page_size};
  const int page_of_tile = lane % kAttendTileTokens / page_size;
  const int slot_of_page = lane % kAttendTileTokens % page_size;

  // `coming` is found one step before its copies begin: its page id takes two loads, one after the other.
  Tile computed{.entry = warp * pages, .first_slot = 0};
  Tile coming = computed;
  unsigned seen[kAttendStages];
#pragma unroll
  for (int stage = 0; stage < kAttendStages; ++stage) {
    const TokenPlace place = find_token(params, work, steps, coming, page_of_tile, slot_of_page);
    seen[stage] =
        load_tile<Traits>(attend, work, units, layout, mine + stage * layout.stage_bytes(), rows, place);
    steps.advance(coming);
  }
  TokenPlace next_place = find_token(params, work, steps, coming, page_of_tile, slot_of_page);

  for (int i = static_cast<int>(threadIdx.x); i < kHeads * head_dim; i += static_cast<int>(blockDim.x)) {
    const int g = work.first_query_head + i / head_dim;
    float q = 0.0F;
    if (g < attend.group_size) {
      const int64_t offset = work.row_idx * attend.q.token_stride +
                             (work.head * attend.group_size + g) * attend.q.head_stride + i % head_dim;
      switch (attend.q.type) {
        case core::ElementType::kFloat16:
          q = to_float(static_cast<const __half*>(attend.q.data)[offset]);
          break;
        case core::ElementType::kBFloat16:
          q = to_float(static_cast<const __nv_bfloat16*>(attend.q.data)[offset]);
          break;
        default:
          q = static_cast<const float*>(attend.q.data)[offset];
      }
    }
    queries[i] = q * attend.sm_scale;
  }
  __syncthreads();

  SoftmaxState<Traits> state;
  PageLse page_lse;
#pragma unroll
  for (int h = 0; h < Traits::kLaneHeads; ++h) {
    state.max[h] = -INFINITY;
    state.sum[h] = 0.0F;
  }
  const int first_head = kHeads == 1 ? 0 : lane % kTokenLanes * Traits::kLaneHeads;  // of the lane's
  const bool writes_heads = kHeads > 1 || lane % kTokenLanes == 0;
#pragma unroll 1
  for (int stage = 0; computed.entry < work.num_pages; stage = (stage + 1) % kAttendStages) {
    unsigned char* tile = mine + stage * layout.stage_bytes();
    cp_async_wait<kAttendStages - 1>();
    __syncwarp();

    float dots[2][kHeads];
    tile_logits<Traits>(layout, reinterpret_cast<const T*>(tile), queries, dots);
    const auto* scales = reinterpret_cast<const float*>(tile + layout.scales());
    const int token = lane / kTokenLanes;  // and the one 8 behind
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = token + i * (kAttendTileTokens / 2);
#pragma unroll
      for (int h = 0; h < Traits::kLaneHeads; ++h) {
        if constexpr (Traits::kInt8) dots[i][h] *= scales[t];
        if ((seen[0] >> t & 1U) == 0) dots[i][h] = -INFINITY;
      }
    }
    if (attend.page_lse != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < Traits::kLaneHeads; ++h) {
          const int t = token + i * (kAttendTileTokens / 2);
          if (writes_heads) numerators[t * kHeads + first_head + h] = dots[i][h];
        }
      }
      __syncwarp();
      write_page_lse<Traits>(attend, work, steps, computed, numerators, page_lse);
      __syncwarp();
    }

    bool rescale = false;
#pragma unroll
    for (int h = 0; h < Traits::kLaneHeads; ++h) {
      const float before = state.max[h];
      state.max[h] = fmaxf(before, max_over_tokens(fmaxf(dots[0][h], dots[1][h])));
      const float shift = shift_of(state.max[h]);
      const float factor = __expf(before - shift);
      const float p[2] = {__expf(dots[0][h] - shift), __expf(dots[1][h] - shift)};
      state.sum[h] = state.sum[h] * factor + (p[0] + p[1]);
      rescale |= before != state.max[h];
      if (!writes_heads) continue;
      if (token == 0) rescales[first_head + h] = factor;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = token + i * (kAttendTileTokens / 2);
        float weight = p[i];
        if constexpr (Traits::kInt8) weight *= scales[kAttendTileTokens + t];
        numerators[t * kHeads + first_head + h] = weight;
      }
    }
    rescale = __any_sync(kFullWarp, rescale) != 0;
    __syncwarp();
    add_values<Traits>(layout, reinterpret_cast<const T*>(tile + layout.values()), numerators, rescales,
                       rescale, state);

#pragma unroll
    for (int i = 0; i + 1 < kAttendStages; ++i) seen[i] = seen[i + 1];
    seen[kAttendStages - 1] = load_tile<Traits>(attend, work, units, layout, tile, rows, next_place);
    steps.advance(coming);
    next_place = find_token(params, work, steps, coming, page_of_tile, slot_of_page);
    steps.advance(computed);
  }
  cp_async_wait<0>();
  __syncwarp();

  // The ring is free: it takes the warp's acc.
  auto* acc = reinterpret_cast<float*>(mine);
  static_assert(kHeads * sizeof(float) <= kAttendStages * 2 * kAttendTileTokens * sizeof(T),
                "A warp's ring holds its sums.");
  auto* maxima = reinterpret_cast<float*>(shared + layout.states()) + warp * kHeads;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int s = 0; s < Traits::kSlices; ++s) {
      const int d = (s * kWarpSize + lane) * Traits::kChannels;
      if (Traits::kHeadDim == 0 && d >= head_dim) continue;
#pragma unroll
      for (int i = 0; i < Traits::kChannels; ++i) acc[h * head_dim + d + i] = state.acc[h][s][i];
    }
  }
#pragma unroll
  for (int h = 0; h < Traits::kLaneHeads; ++h) {
    const float sum = sum_over_tokens(state.sum[h]);
    if (lane / kTokenLanes != 0 || !writes_heads) continue;
    maxima[first_head + h] = state.max[h];
    maxima[layout.num_warps * kHeads + first_head + h] = sum;
  }
  __syncthreads();
  join_warps<Traits>(attend, work, layout, shared);

  const unsigned head_blocks = (static_cast<unsigned>(attend.group_size) + kHeads - 1) / kHeads;
  if (!is_last(attend, work.row_head, static_cast<unsigned>(work.num_chunks) * head_blocks, shared)) return;
  join_chunks(attend, work.row_head, work.num_chunks, head_dim, shared);
}

}  // namespace tinyserve::cuda
