// Copies blocks, one page and kv head each, between tensors of pages. A block of threads takes one of them at
// a time; its neighbouring threads copy neighbours of the source.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "cuda/arch.cuh"

namespace tinyserve::cuda {

inline constexpr int kMoveThreads = 128;

// Word: of the size of an element. Grid: as many blocks as one likes.
template <typename Word>
__global__ void __launch_bounds__(kMoveThreads)
    move_pages_kernel(const __grid_constant__ core::MovePagesParams params) {
  const core::PagePart& from = params.from;
  const core::PagePart& to = params.to;
  const bool columns_first = from.column_stride <= from.row_stride || from.rows == 1;
  const int64_t fast_size = columns_first ? from.columns : from.rows;
  for (int64_t item = blockIdx.x; item < params.num_pages * from.num_heads; item += gridDim.x) {
    const int64_t page = item / from.num_heads;
    const int64_t head = item % from.num_heads;
    const int64_t from_page = params.from_ids == nullptr ? page : params.from_ids[page];
    const int64_t to_page = params.to_ids == nullptr ? page : params.to_ids[page];
    const char* source = from.data + from_page * from.page_stride + head * from.head_stride;
    char* target = to.data + to_page * to.page_stride + head * to.head_stride;
    for (int64_t i = threadIdx.x; i < from.rows * from.columns; i += blockDim.x) {
      const int64_t row = columns_first ? i / fast_size : i % fast_size;
      const int64_t column = columns_first ? i % fast_size : i / fast_size;
      *reinterpret_cast<Word*>(target + row * to.row_stride + column * to.column_stride) =
          *reinterpret_cast<const Word*>(source + row * from.row_stride + column * from.column_stride);
    }
  }
}

}  // namespace tinyserve::cuda
