// How K and V come into shared memory: a warp takes the pages of its chunk in turns, as tiles of 16 tokens,
// and has a ring of tiles of its own, filled by asynchronous copies while the one before is worked on. Tokens
// that the row does not see are never read: their keys and values are zeros in the tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/page_pool_view.h"
#include "core/params.h"
#include "cuda/arch.cuh"
#include "cuda/attend_chunks.h"
#include "cuda/attend_work.cuh"

namespace tinyserve::cuda {

inline constexpr int kAttendStages = 2;  // of a warp's ring

// How rows of K and V come into shared memory, as the pool's alignment allows.
enum class CopyUnit : int { kBytes16, kBytes8, kElement };

struct CopyUnits {
  CopyUnit k;  // kElement where keys are channel-major: they are transposed on the way
  CopyUnit v;
};

// A stage of the ring: keys, values, and the scales of int8 pages.
template <typename T>
struct StageLayout {
  int head_dim;
  int k_pitch;  // elements from row to row
  int v_pitch;

  static constexpr int kElement = static_cast<int>(sizeof(T));
  static constexpr int kTokens = kAttendTileTokens;

  constexpr int values() const { return kTokens * k_pitch * kElement; }
  constexpr int scales() const { return values() + kTokens * v_pitch * kElement; }  // float [2][kTokens]
  constexpr int bytes() const {
    return scales() + (std::is_same_v<T, int8_t> ? 2 * kTokens * static_cast<int>(sizeof(float)) : 0);
  }
};

// A tile that has arrived.
template <typename T>
struct LoadedTile {
  const T* keys;
  const T* values;
  const float* scales;  // int8 only: those of the keys, then those of the values
  unsigned seen;        // a bit for each token
};

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

template <typename T>
struct TileRing {
  const core::AttendPagesBatchParams& params;
  const AttendWork& work;
  const CopyUnits units;
  const StageLayout<T> layout;
  unsigned char* stages;  // [kAttendStages][layout.bytes()]
  int64_t* rows;          // [2][kAttendTileTokens]: where the rows of the tile in coming lie
  TileSteps steps;
  int page_of_tile;  // of the lane's token
  int slot_of_page;
  Tile computed = {};  // the oldest in the ring
  Tile coming = {};    // the one that is copied next
  // Of `coming`, found one step before its copies begin: its page id takes two loads, one after the other.
  TokenPlace next_place = {};
  unsigned seen[kAttendStages] = {};
  int stage = 0;

  __device__ __forceinline__ TileRing(const core::AttendPagesBatchParams& all, const AttendWork& wanted,
                                      CopyUnits copy_units, const StageLayout<T>& stage_layout, int num_warps,
                                      unsigned char* ring, int64_t* row_places)
      : params(all), work(wanted), units(copy_units), layout(stage_layout), stages(ring), rows(row_places) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const auto page_size = static_cast<int>(params.attend.page_size);
    const int pages = max(kAttendTileTokens / page_size, 1);
    steps = {.pages = pages, .entry_step = num_warps * pages, .page_size = page_size};
    page_of_tile = lane % kAttendTileTokens / page_size;
    slot_of_page = lane % kAttendTileTokens % page_size;
    computed.entry = coming.entry = static_cast<int>(threadIdx.x) / kWarpSize * pages;
#pragma unroll
    for (int i = 0; i < kAttendStages; ++i) {
      next_place = find_token(params, work, steps, coming, page_of_tile, slot_of_page);
      seen[i] = start_copies(stages + i * layout.bytes(), next_place);
      steps.advance(coming);
    }
    next_place = find_token(params, work, steps, coming, page_of_tile, slot_of_page);
  }

  __device__ __forceinline__ bool done() const { return computed.entry >= work.num_pages; }

  // The oldest tile, for all lanes.
  __device__ __forceinline__ LoadedTile<T> wait() const {
    cp_async_wait<kAttendStages - 1>();
    __syncwarp();
    const unsigned char* tile = stages + stage * layout.bytes();
    return {.keys = reinterpret_cast<const T*>(tile),
            .values = reinterpret_cast<const T*>(tile + layout.values()),
            .scales = reinterpret_cast<const float*>(tile + layout.scales()),
            .seen = seen[0]};
  }

  // Has the oldest tile overwritten by the one to come.
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i + 1 < kAttendStages; ++i) seen[i] = seen[i + 1];
    seen[kAttendStages - 1] = start_copies(stages + stage * layout.bytes(), next_place);
    steps.advance(coming);
    next_place = find_token(params, work, steps, coming, page_of_tile, slot_of_page);
    steps.advance(computed);
    stage = (stage + 1) % kAttendStages;
  }

  // Afterwards the ring is memory like any other.
  __device__ __forceinline__ void drain() const {
    cp_async_wait<0>();
    __syncwarp();
  }

 private:
  // Returns which of the tokens are seen.
  __device__ __forceinline__ unsigned start_copies(unsigned char* to, const TokenPlace& place) const {
    const core::AttendPagesParams& attend = params.attend;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const bool is_seen = place.page_id >= 0;
    const core::PagePoolView& pool = lane < kAttendTileTokens ? attend.k_pages : attend.v_pages;
    __syncwarp();  // the stage and `rows` are not read any more
    rows[lane] = !is_seen ? -1
                          : (place.page_id * pool.page_stride + work.head * pool.head_stride +
                             place.slot * pool.token_stride) *
                                static_cast<int64_t>(sizeof(T));
    __syncwarp();
    copy_tile<T>(units.k, to, layout.k_pitch * layout.kElement, attend.k_pages, rows, layout.head_dim);
    copy_tile<T>(units.v, to + layout.values(), layout.v_pitch * layout.kElement, attend.v_pages,
                 rows + kAttendTileTokens, layout.head_dim);
    if constexpr (std::is_same_v<T, int8_t>) {
      auto* scales = reinterpret_cast<float*>(to + layout.scales());
      const float* from = is_seen ? pool.token_scales(place.page_id, work.head) + place.slot : pool.scales;
      cp_async<4>(scales + lane, from, is_seen ? 4 : 0);
    }
    cp_async_commit();
    return __ballot_sync(kFullWarp, is_seen) & ((1U << kAttendTileTokens) - 1);
  }
};

}  // namespace tinyserve::cuda
