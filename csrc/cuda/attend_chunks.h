// How attend_pages cuts a row's page list: into chunks, one to a block, of a number of pages that follows
// from the length of the list and the page size alone. So neither the batch nor whether the list came from a
// selection changes a bit. Not core::kChunkPages: that gives a budget of 2048 tokens 8 blocks per kv head, of
// 1 token each where pages hold one, and the longest lists more partial results than one block merges
// quickly.
#pragma once

#include <cstdint>

namespace tinyserve::cuda {

inline constexpr int kAttendWarps = 4;           // of a block, at most
inline constexpr int kAttendTileTokens = 16;     // what a warp holds of K and V in one stage of its ring
inline constexpr int64_t kMinChunkTokens = 128;  // two tiles for each warp: both are under way at once
inline constexpr int64_t kMaxChunks = 64;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A page lies in one warp, so a chunk has a page for each.
constexpr int64_t min_chunk_pages(int64_t page_size) {
  return kMinChunkTokens / page_size > kAttendWarps ? kMinChunkTokens / page_size : kAttendWarps;
}

constexpr int64_t chunk_pages(int64_t num_pages, int64_t page_size) {
  const int64_t least = min_chunk_pages(page_size);
  return num_pages <= least * kMaxChunks ? least : least * ceil_div(num_pages, least * kMaxChunks);
}

// Chunks that cover any list of at most that many pages; AttendPagesParams::max_chunks.
constexpr int64_t max_chunks(int64_t max_list_pages, int64_t page_size) {
  const int64_t chunks = ceil_div(max_list_pages, min_chunk_pages(page_size));
  return chunks < 1 ? 1 : (chunks < kMaxChunks ? chunks : kMaxChunks);
}

}  // namespace tinyserve::cuda
