// Fixed limits of the page format and of the kernels; the argument checks quote them in their messages.
#pragma once

#include <cstdint>

namespace tinyserve::core {

inline constexpr int64_t kMinHeadDim = 8;
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kHeadDimMultiple = 8;
inline constexpr int64_t kMaxPageSize = 64;

// Pages per partial softmax. A row's chunks are cut from its own page list alone and merged in list
// order, which makes the result independent of threads, of the batch, and of dense versus sparse lists.
inline constexpr int64_t kChunkPages = 16;

// Pages scored by one work item.
inline constexpr int64_t kScoreChunkPages = 256;

// Queries (rows times heads of a group) that one prefill work item carries through its key tiles, and the
// tokens of a tile. Bounds what a worker keeps on its stack.
inline constexpr int64_t kPrefillQueries = 128;
inline constexpr int64_t kPrefillTileTokens = 64;

}  // namespace tinyserve::core
