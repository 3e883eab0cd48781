#include "cuda/move_pages.h"

#include <algorithm>

#include "cuda/move_pages.cuh"
#include "cuda/vector_load.cuh"

namespace tinyserve::cuda {
namespace {

// Blocks that are one piece of memory in the same order, as rows of words as long as their alignment allows.
core::MovePagesParams in_words(core::MovePagesParams params) {
  if (!params.same_order()) return params;
  const int64_t bytes = params.from.rows * params.from.columns * params.from.element_size;
  int64_t word = 16;
  for (const core::PagePart* part : {&params.from, &params.to}) {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(part->data));
    while ((address | part->page_stride | part->head_stride | bytes) % word != 0) word /= 2;
  }
  for (core::PagePart* part : {&params.from, &params.to}) {
    part->rows = 1;
    part->row_stride = bytes;
    part->columns = bytes / word;
    part->column_stride = part->element_size = word;
  }
  return params;
}

}  // namespace

cudaError_t move_pages(const core::MovePagesParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  const int64_t num_blocks = std::min(params.num_pages * params.from.num_heads, kMaxBlocks);
  if (num_blocks == 0 || params.from.rows * params.from.columns == 0) return cudaSuccess;
  const core::MovePagesParams words = in_words(params);
  const LaunchConfig config{
      .grid = {static_cast<unsigned>(num_blocks)}, .block = {kMoveThreads}, .stream = stream};
  switch (words.from.element_size) {
    case 1:
      return launch(&move_pages_kernel<uint8_t>, config, words);
    case 2:
      return launch(&move_pages_kernel<HalfWord>, config, words);
    case 4:
      return launch(&move_pages_kernel<OneWord>, config, words);
    case 8:
      return launch(&move_pages_kernel<TwoWords>, config, words);
    case 16:
      return launch(&move_pages_kernel<FourWords>, config, words);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace tinyserve::cuda
